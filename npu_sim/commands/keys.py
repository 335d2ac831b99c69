"""The commands `sign`, `keygen` and `trust`, which decide whose compiled code may run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from npu_sim.commands.console import print_json
from npu_sim.commands.options import AsJSON, ProgramFile


def sign(
    program_file: ProgramFile,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Ed25519 private key (PEM), from `npu-sim keygen`.")],
    json: AsJSON = False,
) -> None:
    """Sign a program, so that others can run its code.

    Programs for CUDA contain code; others need no signature. Those who trust your public key will run the code in
    what you sign, so sign only what you made.
    """
    from npu_compiler.compiled_program import sign_program

    signer = sign_program(program_file, key)
    if json:
        print_json({"program": str(program_file), "fingerprint": signer})
    else:
        typer.echo(f"{program_file}: signed by {signer}")


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the private key; the public key goes to FILE.pub.")
    ],
    json: AsJSON = False,
) -> None:
    """Make a key to sign programs with."""
    from npu_compiler.program.signatures import make_key_pair

    public, name = make_key_pair(file)
    if json:
        print_json({"private_key": str(file), "public_key": str(public), "fingerprint": name})
        return
    typer.echo(f"{file}: private key; keep it secret")
    typer.echo(f"{public}: public key {name}; give it to those who trust you")


def trust(
    public_key: Annotated[
        Path | None,
        typer.Argument(metavar="PUBLIC_KEY", help="Public key (PEM) to trust. Default: list the trusted keys."),
    ] = None,
    remove: Annotated[str | None, typer.Option(metavar="FINGERPRINT", help="No longer trust this key.")] = None,
    json: AsJSON = False,
) -> None:
    """Trust a public key: programs signed with it may run their code here. Or list or remove trusted keys."""
    from npu_compiler.errors import InputError
    from npu_compiler.program.signatures import distrust_key, trust_key, trusted_keys

    if public_key is not None and remove is not None:
        raise InputError("give either a public key to trust or --remove, not both")
    facts: dict[str, Any]
    if public_key is not None:
        name = trust_key(public_key)
        text, facts = f"trusted: {name}", {"trusted": name}
    elif remove is not None:
        distrust_key(remove)
        text, facts = f"no longer trusted: {remove}", {"removed": remove}
    else:
        keys = trusted_keys()
        text = "\n".join(f"{name}  {path}" for name, path in keys.items())
        facts = {"keys": [{"fingerprint": name, "file": str(path)} for name, path in keys.items()]}
    if json:
        print_json(facts)
    elif text:
        typer.echo(text)
