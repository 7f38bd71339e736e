"""A shared library in place of NVML: each call answers a value or an error code that a test sets, or hangs."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Collection
from pathlib import Path

_U32, _U64 = "unsigned int", "unsigned long long"
ONE_NUMBER = {
    "nvmlDeviceGetPowerUsage": _U32,
    "nvmlDeviceGetCurrentClocksEventReasons": _U64,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _U64,
    "nvmlDeviceGetMaxPcieLinkGeneration": _U32,
    "nvmlDeviceGetMaxPcieLinkWidth": _U32,
    "nvmlDeviceGetCurrPcieLinkWidth": _U32,
    "nvmlDeviceGetIndex": _U32,
}
"""Calls that answer one number for a device, and its C type."""

BEGINNING = """
#include <string.h>
#include <unistd.h>
#define CALLS 64
static struct { char name[80]; volatile int code; volatile unsigned long long value; volatile int hangs; } calls[CALLS];
static int count;
static int at(const char *name) {
    for (int i = 0; i < count; i++) if (!strcmp(calls[i].name, name)) return i;
    strncpy(calls[count].name, name, 79);
    return count++;
}
void fake_set(const char *name, int code, unsigned long long value, int hangs) {
    int i = at(name);
    calls[i].code = code; calls[i].value = value; calls[i].hangs = hangs;
}
static int enter(const char *name) {
    int i = at(name);
    while (calls[i].hangs) usleep(2000);
    return calls[i].code;
}
#define VALUE(name) calls[at(name)].value
#define DEVICE(index) ((void *)(unsigned long)((index) + 1))
static unsigned long index_of(void *device) { return (unsigned long)device - 1; }
"""

FUNCTIONS = {
    "nvmlInitWithFlags": "(unsigned int flags) { return enter(F); }",
    "nvmlShutdown": "(void) { return enter(F); }",
    "nvmlErrorString": '(int code) { return "an error of the fake"; }',
    "nvmlSystemGetDriverVersion": '(char *text, unsigned int n) { strcpy(text, "570.1"); return enter(F); }',
    "nvmlDeviceGetCount_v2": "(unsigned int *n) { *n = VALUE(F); return enter(F); }",
    "nvmlDeviceGetHandleByIndex_v2": (
        "(unsigned int i, void **device) { *device = DEVICE(i); if (VALUE(F) >> 32 & (1 << i)) return 4; "
        "return VALUE(F) & (1 << i) ? 15 : enter(F); }"
    ),
    "nvmlDeviceGetHandleByUUID": (
        "(const char *uuid, void **device) { *device = DEVICE(uuid[4] - '0'); return enter(F); }"
    ),
    "nvmlDeviceGetUUID": (
        '(void *device, char *text, unsigned int n) { strcpy(text, "GPU-0"); text[4] += index_of(device); '
        "return enter(F); }"
    ),
    "nvmlDeviceGetName": '(void *device, char *text, unsigned int n) { strcpy(text, "Fake L4"); return enter(F); }',
    "nvmlDeviceGetPciInfo_v3": (
        "(void *device, unsigned int *info) { info[4] = 0; info[5] = 0x10 + index_of(device); info[6] = 0; "
        "return enter(F); }"
    ),
    "nvmlDeviceGetMemoryInfo": (
        "(void *device, unsigned long long *memory) { memory[0] = 24ull << 30; memory[2] = VALUE(F); "
        "memory[1] = memory[0] - memory[2]; return enter(F); }"
    ),
    "nvmlDeviceGetUtilizationRates": (
        "(void *device, unsigned int *rates) { rates[0] = VALUE(F); rates[1] = 0; return enter(F); }"
    ),
    "nvmlDeviceGetTemperature": (
        "(void *device, int sensor, unsigned int *degrees) { *degrees = VALUE(F); return enter(F); }"
    ),
    "nvmlDeviceGetTotalEccErrors": (
        "(void *device, int kind, int counter, unsigned long long *errors) "
        "{ *errors = kind ? VALUE(F) >> 32 : VALUE(F) & 0xffffffff; return enter(F); }"
    ),
    "nvmlDeviceGetRemappedRows": (
        "(void *device, unsigned int *c, unsigned int *u, unsigned int *pending, unsigned int *failure) "
        "{ *c = *u = *pending = 0; *failure = VALUE(F); return enter(F); }"
    ),
    "nvmlEventSetCreate": "(void **set) { *set = DEVICE(99); return enter(F); }",
    "nvmlDeviceRegisterEvents": "(void *device, unsigned long long kinds, void *set) { return enter(F); }",
    "nvmlEventSetWait_v2": (
        "(void *set, unsigned long long *event, unsigned int ms) { int code = enter(F); if (code) return code; "
        "if (!VALUE(F)) { usleep(ms * 1000); return 10; } event[1] = 8; event[2] = VALUE(F); VALUE(F) = 0; return 0; }"
    ),
} | {
    name: f"(void *device, {kind} *value) {{ *value = VALUE(F); return enter(F); }}"
    for name, kind in ONE_NUMBER.items()
}
"""Each function's parameters and body; F is its name."""


def build(folder: Path, missing: Collection[str] = ()) -> Path:
    """The library without the functions in `missing`."""
    source, library = folder / "fake_nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(BEGINNING + "".join(_function(name) for name in FUNCTIONS if name not in missing))
    subprocess.run(["cc", "-shared", "-fPIC", "-O0", "-w", "-o", library, source], check=True)
    return library


class FakeNvml:
    """One library, with its own state for each file that it was copied to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.set("nvmlDeviceGetCount_v2", value=1)

    def set(self, name: str, *, code: int = 0, value: int = 0, hangs: bool = False) -> None:
        """What the call answers from now on; `hangs`: it returns only after a later `set` without it."""
        self._library.fake_set(name.encode(), code, ctypes.c_ulonglong(value), int(hangs))


def _function(name: str) -> str:
    kind = "const char *" if name == "nvmlErrorString" else "int"
    return f'#define F "{name}"\n{kind} {name}{FUNCTIONS[name]}\n#undef F\n'
