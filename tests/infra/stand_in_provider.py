"""Stands for Terraform's AWS provider, which can't be had everywhere: its very schema, and no AWS behind it.

Terraform itself checks modules against the schema (provider_schema.json, of the provider's published bindings), plans
and applies. What AWS would compute is made up. What only the provider knows is not here: its own checks of values, and
which arguments force a replacement. Run by Terraform, `install` says where it is found; or, by `running`, once for many
of Terraform's commands.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("provider_schema.json").read_text())
NAME = "hashicorp/aws"
HOSTS = ("registry.terraform.io", "registry.opentofu.org")
PROVIDER = {
    "attributes": {"region": {"type": "string", "optional": True}},
    "blocks": {
        "default_tags": {
            "nesting": "list", "most": 1, "required": False,
            "block": {"attributes": {"tags": {"type": ["map", "string"], "optional": True}}, "blocks": {}},
        }
    },
}  # fmt: skip
NESTING = {"list": 2, "set": 3}
"""In Terraform's protocol."""


def install(folder: Path) -> Path:
    """A mirror of providers in the folder that holds this one alone; returns the file for TF_CLI_CONFIG_FILE."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    for host in HOSTS:
        place = folder / host / NAME / SCHEMA["provider"] / f"linux_{machine}"
        place.mkdir(parents=True)
        program = place / f"terraform-provider-aws_v{SCHEMA['provider']}"
        # its certificates' cache goes to HOME
        program.write_text(f'#!/bin/sh\nHOME="{folder}" exec "{sys.executable}" "{__file__}"\n')
        program.chmod(0o755)
    file = folder / "terraform.rc"
    file.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{folder}"\n  }}\n}}\n')
    return file


@contextmanager
def running() -> Iterator[str]:
    """Provides the value for TF_REATTACH_PROVIDERS: Terraform asks one process then, and starts none of its own. What
    that was installed, and in which version, it does not look at."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-u", __file__, "--dev"],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            told = next(line for line in process.stdout if "TF_REATTACH_PROVIDERS" in line)
            (place,) = json.loads(re.findall("'(.*)'", told)[0]).values()
            yield json.dumps({f"{host}/{NAME}": place for host in HOSTS})
        finally:
            process.kill()


def made_up(name: str, kind: Any) -> Any:
    if kind == "string":
        return f"{name}-of-nobody"
    if isinstance(kind, str):
        return {"number": 1, "bool": False}[kind]
    return {} if kind[0] == "map" else []


def filled(block: dict[str, Any], value: dict[str, Any], unknown: Any) -> dict[str, Any]:
    """The value with what is computed and not known yet: as unknown, or (None) made up."""
    result = dict(value)
    for name, given in block["attributes"].items():
        if given.get("computed") and (result[name] is None or (unknown is None and not _plain(result[name]))):
            result[name] = made_up(name, given["type"]) if unknown is None else unknown
    for name, nested in block["blocks"].items():
        result[name] = [filled(nested["block"], entry, unknown) for entry in result[name] or ()]
    return result


def _plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, list, dict))


def serve() -> None:
    import tf.provider
    import tf.runner
    from tf.gen import tfplugin_pb2 as pb
    from tf.gen import tfplugin_pb2_grpc as rpc
    from tf.types import Unknown
    from tf.utils import read_dynamic_value, to_dynamic_value

    def described(block: dict[str, Any]) -> pb.Schema.Block:
        return pb.Schema.Block(
            attributes=[
                pb.Schema.Attribute(name=name, **{**given, "type": json.dumps(given["type"]).encode()})
                for name, given in block["attributes"].items()
            ],
            block_types=[
                pb.Schema.NestedBlock(
                    type_name=name, block=described(nested["block"]), nesting=NESTING[nested["nesting"]],
                    min_items=int(nested["required"]), max_items=nested["most"],
                )
                for name, nested in block["blocks"].items()
            ],
        )  # fmt: skip

    class Servicer(rpc.ProviderServicer):
        def __init__(self, _: object) -> None: ...

        def GetMetadata(self, request: Any, context: Any) -> Any:
            return pb.GetMetadata.Response(server_capabilities=pb.ServerCapabilities())

        def GetProviderSchema(self, request: Any, context: Any) -> Any:
            return pb.GetProviderSchema.Response(
                provider=pb.Schema(block=described(PROVIDER)),
                resource_schemas={name: pb.Schema(block=described(b)) for name, b in SCHEMA["resource"].items()},
                data_source_schemas={name: pb.Schema(block=described(b)) for name, b in SCHEMA["data"].items()},
            )

        def ValidateProviderConfig(self, request: Any, context: Any) -> Any:
            return pb.ValidateProviderConfig.Response()

        def ValidateResourceConfig(self, request: Any, context: Any) -> Any:
            return pb.ValidateResourceConfig.Response()

        def ValidateDataResourceConfig(self, request: Any, context: Any) -> Any:
            return pb.ValidateDataResourceConfig.Response()

        def ConfigureProvider(self, request: Any, context: Any) -> Any:
            return pb.ConfigureProvider.Response()

        def StopProvider(self, request: Any, context: Any) -> Any:
            return pb.StopProvider.Response()

        def UpgradeResourceState(self, request: Any, context: Any) -> Any:
            return pb.UpgradeResourceState.Response(upgraded_state=pb.DynamicValue(json=request.raw_state.json))

        def ReadDataSource(self, request: Any, context: Any) -> Any:
            state = filled(SCHEMA["data"][request.type_name], read_dynamic_value(request.config), None)
            return pb.ReadDataSource.Response(state=to_dynamic_value(state))

        def ReadResource(self, request: Any, context: Any) -> Any:
            return pb.ReadResource.Response(new_state=request.current_state)

        def PlanResourceChange(self, request: Any, context: Any) -> Any:
            wanted = read_dynamic_value(request.proposed_new_state)
            if wanted is not None:
                wanted = filled(SCHEMA["resource"][request.type_name], wanted, Unknown)
            planned = request.proposed_new_state if wanted is None else to_dynamic_value(wanted)
            return pb.PlanResourceChange.Response(planned_state=planned, legacy_type_system=True)

        def ApplyResourceChange(self, request: Any, context: Any) -> Any:
            planned = read_dynamic_value(request.planned_state)
            if planned is None:  # destroyed
                return pb.ApplyResourceChange.Response(new_state=request.planned_state)
            state = filled(SCHEMA["resource"][request.type_name], planned, None)
            return pb.ApplyResourceChange.Response(new_state=to_dynamic_value(state), legacy_type_system=True)

    tf.provider.ProviderServicer = Servicer  # type: ignore[misc,assignment]
    tf.runner.run_provider(SimpleNamespace(full_name=lambda: NAME))  # type: ignore[arg-type]


if __name__ == "__main__":
    serve()
