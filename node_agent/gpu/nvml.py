"""Wrapper of NVML: absent values are None, and all errors of a GPU that has become unusable are one exception.

Any call may hang in the driver, without a limit here, so calls belong in threads that no other one waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

ABSENT = (
    "NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "NO_DATA", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED",
    "VGPU_ECC_NOT_SUPPORTED",
)  # fmt: skip
"""NVML error codes that mean that this GPU, driver or user does not support a call."""
NOT_HERE = ("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED")
"""NVML error codes that mean that the host has no NVIDIA driver."""
FAILED = ("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND")


class GpuFailed(Exception):
    """The GPU has fallen off the bus, or works only after a reset."""


class NvmlProblem(Exception):
    """Raised when NVML can't be used, or when a call has failed. `code`: NVML's error code, if there is one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class NvmlAbsent(NvmlProblem):
    """Raised when the GPU or driver does not support a call, or the user may not make it. It does not count as a
    problem."""


def load_nvml() -> ModuleType | None:
    """Returns pynvml, initialised; None on a host without pynvml or an NVIDIA driver. Raises NvmlProblem."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if _is_one_of(pynvml, error, (*NOT_HERE, "FUNCTION_NOT_FOUND")):
            return None
        raise NvmlProblem(f"nvmlInit: {error}") from error
    except OSError as error:  # the library can't be loaded
        raise NvmlProblem(f"nvmlInit: {error}") from error
    loaded: ModuleType = pynvml
    return loaded


class Nvml:
    """Calls into NVML, by one thread."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self.calling = ""
        """name of the current call, or empty"""
        self.problems: dict[str, str] = {}
        """reason of the last failure of each call, by its name; NvmlAbsent does not count"""

    def __getattr__(self, name: str) -> Any:
        """Returns NVML's constant of this name."""
        return getattr(self._library, name)

    def ask(self, name: str, *arguments: object) -> Any:
        """Returns the call's result; None if it fails. The reason is in `problems`, unless the call is not supported.

        Raises GpuFailed.
        """
        self.problems.pop(name, None)
        try:
            return self.call(name, *arguments)
        except NvmlAbsent:
            return None
        except NvmlProblem as problem:
            self.problems[name] = str(problem)
            return None

    def call(self, name: str, *arguments: object) -> Any:
        """Calls NVML's function of this name. Raises GpuFailed, or NvmlProblem for any other failure."""
        function: Callable[..., Any] = getattr(self._library, name)
        self.calling = name
        try:
            return function(*arguments)
        except self._library.NVMLError as error:
            message = f"{name}: {error}"
            if _is_one_of(self._library, error, FAILED):
                raise GpuFailed(message) from error
            kind = NvmlAbsent if _is_one_of(self._library, error, ABSENT) else NvmlProblem
            raise kind(message, error.value) from error
        except UnicodeDecodeError as error:
            raise NvmlProblem(f"{name}: the answer is not text") from error
        finally:
            self.calling = ""


def _is_one_of(library: ModuleType, error: Any, names: tuple[str, ...]) -> bool:
    return error.value in [getattr(library, f"NVML_ERROR_{name}", None) for name in names]
