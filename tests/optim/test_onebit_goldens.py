"""Covers the compressed optimizers' mathematics: workers simulated in one process, against values computed by hand."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# ---- the oracles: one list entry a worker, one tensor a leaf; plain code, no mesh ----

B1, B2, EPS = 0.9, 0.999, 1e-8
Mean = Callable[[list[Tensor]], Tensor]


def signs(y: Tensor) -> Tensor:
    return torch.where(y >= 0, 1.0, -1.0).to(y.dtype)


class OneBitMean:
    """The mean over workers, through one bit an element and back, with error feedback on both ways."""

    def __init__(self, num: int, n: int, padded: int | None = None) -> None:
        d = math.lcm(num, 8)
        self.n, self.padded = n, padded or math.ceil(n / (num * d)) * num * d
        self.worker = [torch.zeros(self.padded, dtype=torch.float64) for _ in range(num)]
        self.server = [torch.zeros(self.padded // num, dtype=torch.float64) for _ in range(num)]

    def __call__(self, xs: list[Tensor]) -> Tensor:
        num = len(xs)
        ys = [
            torch.cat([x.reshape(-1), x.new_zeros(self.padded - self.n)]) + e
            for x, e in zip(xs, self.worker, strict=True)
        ]
        sent = [y.norm() / self.padded**0.5 * signs(y) for y in ys]
        self.worker = [y - s for y, s in zip(ys, sent, strict=True)]
        out = []
        for j, chunk in enumerate(zip(*(s.chunk(num) for s in sent), strict=True)):
            z = sum(chunk) / num + self.server[j]
            back = z.norm() / z.numel() ** 0.5 * signs(z)
            self.server[j] = z - back
            out.append(back)
        return torch.cat(out)[: self.n].view_as(xs[0])


def exact_mean(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).mean(0)


def onebit_adam_steps(
    p: Tensor, grads: list[list[Tensor]], mean: Mean, *, lr: float, freeze: int, wd: float = 0.0, corrected: bool
) -> list[dict[str, Tensor]]:
    """`grads[t - 1][w]`. After the freeze the variance, and its bias correction, stay."""
    m, v, out = torch.zeros_like(p), torch.zeros_like(p), []
    for t, local in enumerate(grads, 1):
        if t <= freeze:
            g = exact_mean(local)
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        else:
            m = mean([B1 * m + (1 - B1) * g for g in local])
        c1, c2 = (1 - B1**t, 1 - B2 ** min(t, freeze)) if corrected else (1.0, 1.0)
        p = p - lr * (m / c1 / ((v / c2).sqrt() + EPS) + wd * p)
        out.append({"p": p, "m": m, "v": v})
    return out


def zero_one_adam_steps(
    p: Tensor,
    grads: list[list[Tensor]],
    new_mean: Callable[[], Mean],
    *,
    lr: float,
    var_freeze: int,
    var_scaler: int,
    local_scaler: int,
    clipper: int,
    wd: float = 0.0,
) -> list[dict[str, Any]]:
    """Variance at growing intervals, then local steps between rounds that grow rarer."""
    num = len(grads[0])
    m, v, mean = [torch.zeros_like(p)] * num, torch.zeros_like(p), new_mean()
    ps, acc = [p] * num, [torch.zeros_like(p)] * num
    var_interval, var_counter, local_interval, local_counter, lrs = 1, 0, 1, 0, 0.0
    out = []
    for t, local in enumerate(grads, 1):
        if t <= var_freeze + 1:  # the switch is at the end of a step with t > var_freeze
            full = t % var_interval == 0
            g = exact_mean(local) if full else mean(local)
            m = [B1 * m[0] + (1 - B1) * g] * num
            if full:
                v = B2 * v + (1 - B2) * g**2
                var_counter += 1
                if var_counter == var_scaler:
                    var_counter, var_interval = 0, 2 * var_interval
            ps = [ps[0] - lr * (m[0] / (v.sqrt() + EPS) + wd * ps[0])] * num
            kind = "full" if full else "1bit"
            if t == var_freeze + 1:
                mean = new_mean()
        else:
            d = v.sqrt() + EPS
            m = [B1 * x + (1 - B1) * g for x, g in zip(m, local, strict=True)]
            lrs += lr
            us = [x / d + wd * q for x, q in zip(m, ps, strict=True)]
            ps = [q - lr * u for q, u in zip(ps, us, strict=True)]
            acc = [a - lr * u for a, u in zip(acc, us, strict=True)]
            kind = "local"
            if t % local_interval == 0:
                kind = "sync"
                ps = [q - a for q, a in zip(ps, acc, strict=True)]
                total = mean([a * d for a in acc])
                m, ps = [-total / lrs] * num, [q + total / d for q in ps]
                acc, lrs = [torch.zeros_like(p)] * num, 0.0
            local_counter += 1
            if local_counter == local_scaler:
                local_counter, local_interval = 0, min(clipper, 2 * local_interval)
        out.append({"p": ps, "m": m, "v": v, "kind": kind, "var": var_interval, "local": local_interval})
    return out


def onebit_lamb_steps(
    ps: list[Tensor],
    grads: list[list[list[Tensor]]],
    mean: Mean,
    *,
    lr: float,
    freeze: int,
    wd: float = 0.0,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
) -> list[dict[str, Any]]:
    """`grads[t - 1][w][leaf]`; no bias correction. After the freeze all leaves travel as one vector."""
    sizes = [p.numel() for p in ps]
    ms, vs = ([torch.zeros_like(p) for p in ps] for _ in range(2))
    mean_coeff, last_f = [0.0] * len(ps), [1.0] * len(ps)
    fresh: list[Tensor] = []
    scaling: list[Tensor] = []
    out = []
    for t, local in enumerate(grads, 1):
        coeffs: list[float] = []
        if t <= freeze:
            gs = [exact_mean([w[i] for w in local]) for i in range(len(ps))]
            ms = [B1 * m + (1 - B1) * g for m, g in zip(ms, gs, strict=True)]
            vs = [B2 * v + (1 - B2) * g**2 for v, g in zip(vs, gs, strict=True)]
            us = [m / (v.sqrt() + EPS) + wd * p for m, v, p in zip(ms, vs, ps, strict=True)]
            for i, (p, u) in enumerate(zip(ps, us, strict=True)):
                both = p.norm() > 0 and u.norm() > 0
                c = min(max(float(p.norm() / u.norm()), 0.01), 10.0) if both else 1.0
                if c != 1.0:
                    mean_coeff[i] = coeff_beta * mean_coeff[i] + (1 - coeff_beta) * c
                coeffs.append(c)
            fresh = list(vs)
        else:
            if not scaling:
                rms = [m.norm() / m.numel() ** 0.5 for m in ms]
                scaling = [sum(rms) / len(rms) / r for r in rms]
            old = ms
            scaled = [[(B1 * m + (1 - B1) * g) * s for m, g, s in zip(ms, w, scaling, strict=True)] for w in local]
            whole = mean([torch.cat([x.reshape(-1) for x in w]) for w in scaled])
            ms = [x.view_as(m) / s for x, m, s in zip(whole.split(sizes), ms, scaling, strict=True)]
            gs = [(m - B1 * o) / (1 - B1) for m, o in zip(ms, old, strict=True)]
            fresh = [B2 * v + (1 - B2) * g**2 for v, g in zip(fresh, gs, strict=True)]
            us = []
            for i, (p, m, v, new) in enumerate(zip(ps, ms, vs, fresh, strict=True)):
                d = v.sqrt() + EPS
                w, u = m / d, m / d + wd * p
                f = float((d / (new.sqrt() + EPS)).max())
                if wd:
                    r = min(1.0, float(w.norm() / u.norm()))
                    f = f * r + (1 - r)
                f = min(max(f, factor_min), factor_max)
                f = last_f[i] = min(max(f, last_f[i] * (1 - factor_threshold)), last_f[i] * (1 + factor_threshold))
                coeffs.append(mean_coeff[i] * f)
                us.append(u)
        ps = [p - lr * c * u for p, c, u in zip(ps, coeffs, us, strict=True)]
        out.append(
            {
                "p": ps,
                "m": ms,
                "v": vs,
                "coeffs": coeffs,
                "scaling": scaling,
                "mean": list(mean_coeff),
                "f": list(last_f),
            }
        )
    return out


def golden_grads(steps: int, num: int = 2, n: int = 8) -> list[list[Tensor]]:
    i = torch.arange(n, dtype=torch.float64)
    return [[torch.sin(0.7 * i + 1.3 * t + 0.9 * w) * (1 + 0.1 * i) for w in range(num)] for t in range(1, steps + 1)]


# ---- the goldens ----


def close(got: Tensor, want: list[float], atol: float = 1e-9) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=atol)


def test_the_mean() -> None:
    mean = OneBitMean(2, 8, padded=8)
    xs = [[1, -2, 3, -4, 0.5, 0.5, -0.5, 0], [-1, -2, 1, 4, 0.25, -0.5, -0.75, 2]]
    xs = [torch.tensor(x, dtype=torch.float64) for x in xs]
    a, b = 1.341931909598993, 1.6429040834778512
    close(mean(xs), [a, -a, a, -a, b, b, -b, b])
    close(
        mean.worker[0],
        [-0.96054839, -0.03945161, 1.03945161, -2.03945161, -1.46054839, -1.46054839, 1.46054839, -1.96054839],
        1e-8,
    )
    close(mean.server[1], [0.25380001, -1.57905978, -0.25380001, 0.25380001], 1e-8)
    a, b = 2.407199948092071, 1.9111488160477388
    close(mean(xs), [-a, -a, a, a, -b, -b, b, b])


def test_onebit_adam() -> None:
    p0, mean = torch.linspace(-1, 1, 8, dtype=torch.float64), OneBitMean(2, 8)
    steps = onebit_adam_steps(p0, golden_grads(6), mean, lr=0.01, freeze=3, corrected=False)
    for t, want in ONEBIT_ADAM.items():
        close(steps[t - 1]["p"], want)
    close(steps[5]["m"], [0.05811224] * 3 + [-0.05811224] * 5, 1e-8)
    close(steps[5]["v"], FROZEN_V)
    close(mean.worker[0], WORKER_ERROR + [0.058483837] * 8)


def test_zero_one_adam() -> None:
    p0 = torch.linspace(-1, 1, 8, dtype=torch.float64)
    numbers = {"lr": 0.01, "var_freeze": 6, "var_scaler": 2, "local_scaler": 2, "clipper": 4}
    steps = zero_one_adam_steps(p0, golden_grads(16), lambda: OneBitMean(2, 8), **numbers)  # type: ignore[arg-type]
    kinds = ["full", "full", "1bit", "full", "1bit", "full", "1bit"]
    assert [s["kind"] for s in steps[:7]] == kinds
    assert [t for t, s in enumerate(steps, 1) if s["kind"] == "sync"] == [8, 9, 10, 12, 16]
    assert [s["var"] for s in steps[:7]] == [1, 2, 2, 2, 2, 4, 4]
    assert [s["local"] for s in steps[7:11]] == [1, 2, 2, 4]
    for t, want in ZERO_ONE_ADAM.items():
        close(steps[t - 1]["p"][0][:3], want)
    apart = [float((s["p"][0] - s["p"][1]).abs().max()) for s in steps]
    assert round(apart[10], 3) == 0.031 and round(apart[14], 3) == 0.105
    assert max(apart[t - 1] for t in (*range(1, 11), 12, 16)) <= 2.3e-16


def test_onebit_lamb() -> None:
    p0 = [torch.linspace(-1, 1, 5, dtype=torch.float64), torch.tensor([0.5, -0.25, 2], dtype=torch.float64)]
    grads = [[list(g.split([5, 3])) for g in step] for step in golden_grads(6)]
    steps = onebit_lamb_steps(p0, grads, OneBitMean(2, 8), lr=0.01, freeze=3, wd=0.01)
    for step, want in zip(steps, ONEBIT_LAMB_COEFFS, strict=True):
        close(torch.tensor(step["coeffs"]), want, 1e-6)
    close(torch.stack(steps[5]["scaling"]), [1.298593229, 0.813050488])
    close(torch.tensor(steps[5]["mean"], dtype=torch.float64), [0.065740880, 0.107942225])
    close(torch.tensor(steps[5]["f"], dtype=torch.float64), [0.863973376, 0.898237210])
    close(torch.cat(steps[5]["p"]), ONEBIT_LAMB)


ONEBIT_ADAM = {
    1: [-1.031622765, -0.745908475, -0.396949753, -0.111234379, 0.174479911, 0.460194197, 0.745908470, 0.968377242],
    3: [-1.06160793, -0.722628265, -0.324955463, -0.035931288, 0.223040854, 0.465386091, 0.693469595, 0.888838116],
    4: [-1.048774309, -0.710173943, -0.311625689, -0.024017971, 0.213561266, 0.456728491, 0.684159633, 0.879259239],
    6: [-1.054044709, -0.715288577, -0.33732948, -0.019125513, 0.217454261, 0.46028392, 0.702112024, 0.897730178],
}
FROZEN_V = [0.001499157, 0.001591862, 0.001389632, 0.001739723, 0.002747683, 0.003294204, 0.00284872, 0.002691017]
WORKER_ERROR = [
    0.042005808, 0.063592724, -0.019884621, -0.046631868, -0.033822636, -0.072929093, -0.004472701, 0.016770449,
]  # fmt: skip
ZERO_ONE_ADAM = {
    2: [-1.062903422, -0.745998114, -0.365080438],
    6: [-1.105728013, -0.749160185, -0.30905376],
    8: [-1.100610281, -0.728255246, -0.275520297],
    10: [-1.074202263, -0.726633527, -0.274325029],
    12: [-1.095269448, -0.697580182, -0.25291163],
    16: [-1.069702366, -0.732839247, -0.278898876],
}
ONEBIT_LAMB_COEFFS = [
    [0.224033, 0.378444],
    [0.220002, 0.436304],
    [0.277940, 0.380209],
    [0.0632089, 0.1079875],
    [0.0631093, 0.1077308],
    [0.0567984, 0.0969577],
]
ONEBIT_LAMB = [
    -1.013085495, -0.500146435, 0.024772557, 0.52632508, 1.017937433, 0.514079523, -0.258089697, 1.953510973,
]  # fmt: skip
