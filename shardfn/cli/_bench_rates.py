"""`shardfn bench serve --rates`: latency against throughput, and the goodput within objectives of latency.

All rates have the same requests, and arrivals drawn with one seed (a Poisson process): only the gaps are scaled.

References:
    Zhong et al., DistServe (goodput), 2024, https://arxiv.org/abs/2401.09670
"""

import asyncio
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.serve import Arrival, Delays

_PARTS = (50, 95)
_NAMES: Mapping[str, Callable[[Delays], list[float]]] = {
    "ttft": lambda one: [one.first],
    "itl": lambda one: one.gaps,
    "e2e": lambda one: [one.whole],
}
_WARM = 4  # requests before the first rate, which no row counts
_WIDTH = 40


class Slo(NamedTuple):
    """Objective of a percentile of latency (service level objective).

    Attributes:
        part: percentile, from 1 to 100.
        name: "ttft" (time to the first token), "itl" (time between tokens) or "e2e" (time of a whole request).
        ms: most milliseconds.
    """

    part: int
    name: str
    ms: float

    def __str__(self) -> str:
        return f"p{self.part}_{self.name}={self.ms:g}ms"


def parse_slo(text: str) -> Slo:
    """Returns an objective.

    Raises:
        ValueError: the text is not an objective.

    Example:
        >>> parse_slo("p95_itl=50ms"), parse_slo("p99_ttft=1.5s").ms
        (Slo(part=95, name='itl', ms=50.0), 1500.0)
    """
    found = re.fullmatch(r"p(\d+)_(\w+)=(\d+(?:\.\d+)?)(ms|s)", text)
    if found is None or not 1 <= int(found[1]) <= 100 or found[2] not in _NAMES or not float(found[3]):
        names = ", ".join(_NAMES)
        raise ValueError(f"--slo must be a percentile, one of {names}, and a time, such as p95_itl=50ms, got {text!r}.")
    return Slo(int(found[1]), found[2], float(found[3]) * (1000 if found[4] == "s" else 1))


def find_percentile(values: Sequence[float], part: int) -> float:
    """Returns the least value that is not below this part of the values, or 0 without values.

    Example:
        >>> find_percentile([3.0, 1.0, 2.0, 4.0], 50)
        2.0
    """
    return round(sorted(values)[max(0, -(-len(values) * part // 100) - 1)], 3) if values else 0.0


def make_row(rate: float, found: Sequence[Delays], seconds: float, slos: Sequence[Slo]) -> dict[str, Any]:
    """Returns the figures of a rate.

    Args:
        rate: arrivals a second.
        found: delays of the answers.
        seconds: seconds of the whole run.
        slos: objectives. A rate with a failed request meets none of them.
    """
    good = [one for one in found if not one.error]
    times = {name: [1e3 * x for one in good for x in read(one)] for name, read in _NAMES.items()}
    row: dict[str, Any] = {"rate": rate, "requests": len(found), "failed": len(found) - len(good)}
    row |= {"requests_per_second": round(len(good) / seconds, 3)}
    row |= {"tokens_per_second": round(sum(one.tokens for one in good) / seconds, 1)}
    row |= {f"p{part}_{name}_ms": find_percentile(times[name], part) for name in _NAMES for part in _PARTS}
    if slos:
        missed = [str(slo) for slo in slos if not good or find_percentile(times[slo.name], slo.part) > slo.ms]
        row |= {"missed": missed, "meets_slo": not missed and not row["failed"]}
    return row


def find_goodput(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the figures of the rate with the most requests a second among those that meet the objectives."""
    good = [row for row in rows if row["meets_slo"]]
    return dict(max(good, key=lambda row: row["requests_per_second"])) if good else None


def run_rates(
    rates: Sequence[float], make_trace: Callable[[float | None], list[Arrival]], send: Any, slos: Sequence[Slo]
) -> tuple[list[dict[str, Any]], list[Delays]]:
    """Returns the figures of each rate in order, and all delays.

    Args:
        rates: arrivals a second of each run.
        make_trace: function from a rate to the requests, for which None lets all arrive at once.
        send: function from requests to their delays, such as `measure` of a url and a model.
        slos: objectives.
    """
    rows, found = list[dict[str, Any]](), list[Delays]()
    asyncio.run(send(make_trace(None)[:_WARM]))
    for rate in rates:
        began = time.monotonic()
        some = asyncio.run(send(make_trace(rate)))
        rows.append(make_row(rate, some, time.monotonic() - began, slos))
        found += some
    return rows, found


def write_rates(rows: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> str:
    """Returns the figures as a table, with the goodput.

    Example:
        >>> row = make_row(2.0, [Delays(0.01, [0.002, 0.004], 0.02, 3)], 0.5, [parse_slo("p95_itl=50ms")])
        >>> print(write_rates([row], [parse_slo("p95_itl=50ms")]))
          rate   done/s   tokens/s   ttft p50      p95    itl p50      p95  failed  slo
             2        2        6.0       10.0     10.0        2.0      4.0       0  met
        goodput at p95_itl=50ms: 2 requests a second, 6.0 tokens a second, at the rate 2
    """
    head = f"{'rate':>6}{'done/s':>9}{'tokens/s':>11}{'ttft p50':>11}{'p95':>9}{'itl p50':>11}{'p95':>9}{'failed':>8}"
    lines = [head + ("  slo" if slos else "")]
    for row in rows:
        ttft, itl = ([row[f"p{part}_{name}_ms"] for part in _PARTS] for name in ("ttft", "itl"))
        line = f"{row['rate']:>6g}{row['requests_per_second']:>9g}{row['tokens_per_second']:>11.1f}"
        line += f"{ttft[0]:>11.1f}{ttft[1]:>9.1f}{itl[0]:>11.1f}{itl[1]:>9.1f}{row['failed']:>8}"
        verdict = "" if not slos else "met" if row["meets_slo"] else ", ".join(row["missed"]) or "failed requests"
        lines.append(f"{line}  {verdict}".rstrip())
    if slos:
        best, names = find_goodput(rows), ", ".join(map(str, slos))
        text = f"goodput at {names}: "
        if best is None:
            lines.append(f"{text}no rate meets it")
        else:
            rate = f"{best['requests_per_second']:g} requests a second, {best['tokens_per_second']:.1f} tokens a second"
            lines.append(f"{text}{rate}, at the rate {best['rate']:g}")
    return "\n".join(lines)


def draw_rates(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draws latency against throughput into a file, or as text on stderr where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"matplotlib is missing, so {path} is not written; the curve as text:", file=sys.stderr)
        print(draw_text(rows), file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    rates = [row["tokens_per_second"] for row in rows]
    for one, name, title in zip(axes, ("ttft", "itl"), ("time to first token", "time between tokens"), strict=True):
        for part in _PARTS:
            one.plot(rates, [row[f"p{part}_{name}_ms"] for row in rows], marker="o", label=f"p{part}")
        one.set(xlabel="tokens a second", ylabel=f"{title}, ms", yscale="log")
        one.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def draw_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns bars of the 95th percentiles by throughput.

    Example:
        >>> row = make_row(2.0, [Delays(0.01, [0.002, 0.004], 0.02, 3)], 0.5, [])
        >>> print(draw_text([row]).splitlines()[1].rstrip("# "))
             6.0      10.0
    """
    most = max(row["p95_ttft_ms"] for row in rows) or 1.0
    lines = ["tokens/s  p95 ttft, ms"]
    for row in rows:
        value = row["p95_ttft_ms"]
        lines.append(f"{row['tokens_per_second']:>8.1f}{value:>10.1f}  {'#' * round(_WIDTH * value / most)}")
    return "\n".join(lines)
