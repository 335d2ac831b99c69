"""The command `calibrate`: a chip file fitted to a device."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from npu_sim.commands.checks import check_output
from npu_sim.commands.console import print_json, progress
from npu_sim.commands.options import AsJSON, CPULevel, DeviceName
from npu_sim.commands.settings import DeviceSettings


def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.toml", callback=check_output, help="Chip file to write.")
    ],
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    arrays: Annotated[
        int | None,
        typer.Option(min=1, metavar="INTEGER", help="Cores or multiprocessors. Default: CPU threads."),
    ] = None,
    sram: Annotated[
        int | None,
        typer.Option(min=1024, metavar="BYTES", help="Cache. Default: what a CPU is found to keep."),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Measure a device with its own kernels and write it as a chip file for `npu-sim simulate`."""
    from npu_compiler.errors import InputError

    device_settings = DeviceSettings(device, cpu_level)
    if output.suffix != ".toml":
        raise InputError(f"'{output}' is no chip file: its name must end in .toml")
    from npu_compiler.files import write_atomically
    from npu_model.chip import parse_chip
    from npu_sim.calibration import chip_text, measure, shape_of

    opened = device_settings.open()
    shape = shape_of(opened, arrays, sram)
    with progress(f"measuring {opened.name}") as report:
        measured = measure(opened, report)
    text = chip_text(measured, shape, output.stem)
    chip = parse_chip(text, str(output))
    write_atomically(output, text.encode())
    if json:
        blocks = [block.to_dict() for block in measured.blocks]
        print_json(
            {
                "chip": str(output),
                **asdict(replace(measured, blocks=())),
                **asdict(shape),
                "sram": chip.sram.size,
                "blocks": blocks,
            }
        )
    else:
        typer.echo(
            f"{output}: {measured.read_gb_s:.1f} GB/s, {max(measured.gmac_s.values()):.1f} GMAC/s, "
            f"{measured.element_gop_s:.1f} G element operations/s, {measured.launch_us:.2f} µs a kernel call"
        )
