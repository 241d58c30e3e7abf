"""Draws the pictures of docs/pipeline.md, and prints its table: python docs/make_schedules.py."""

import itertools
import pathlib

from shardfn import schedules

RANKS, MICROBATCHES = 4, 8
MADE = {
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zb-h1": schedules.zero_bubble_h1,
    "zb-v": schedules.zero_bubble_v,
    "dualpipe-v": schedules.dual_pipe_v,
}


def main() -> None:
    out = pathlib.Path(__file__).parent / "schedules"
    out.mkdir(exist_ok=True)
    print("| schedule | idle | held by the first rank | by the last rank | messages |")
    print("|---|---:|---:|---:|---:|")
    for name, make in MADE.items():
        run = schedules.timeline(make(RANKS, MICROBATCHES))
        (out / f"{name}.svg").write_text(schedules.as_svg(run))
        chunks = run.schedule.num_chunks
        held = [f"{peak / chunks:g}" for peak in (run.peaks[0], run.peaks[-1])]
        print(f"| {name} | {run.bubble:.1%} | {held[0]} | {held[1]} | {_transfers(run.schedule)} |")


def _transfers(of: schedules.PipelineSchedule) -> int:
    """Messages between ranks for each microbatch, forward and backward."""
    homes = [of.home[stage][0] for stage in range(of.num_stages)]
    return 2 * sum(a != b for a, b in itertools.pairwise(homes))


if __name__ == "__main__":
    main()
