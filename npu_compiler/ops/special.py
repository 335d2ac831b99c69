"""Special functions: relatives of the error function, gamma, zeta, Bessel and Airy functions, orthogonal polynomials.

Each polynomial below was fitted to within 3e-8 of its function, in a variable `t` from -1 to 1.
"""

from __future__ import annotations

import math

from npu_compiler.graph.model import OpNode
from npu_compiler.ops.elementwise import elementwise
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Layout, register_op
from npu_compiler.ops.sharding import shard_elementwise
from npu_compiler.program.functions import MOST_ROUNDS, Let, Loop, declare_function, polynomial
from npu_compiler.program.views import View

# fmt: off
_SCALED_ERFC = (
    -0.000224116753, 0.000396307616, 0.00167591218, -0.00984449498, 0.0284092519, -0.0586468577, 0.0922907665,
    -0.108814269, 0.082278423, 0.00358627038, -0.140240654, 1.23751259,
)
_ERFINV_CENTER = (
    -3.33398093e-05, 3.55313787e-05, 0.000284075155, -0.000845545961, -0.000484349963, 0.008529176, -0.0195741933,
    -0.0261086859, 0.616600752, 1.50140941,
)
_ERFINV_TAIL = (
    0.0126245935, -0.0182881616, -0.0354894809, 0.0607373938, 0.0287422109, -0.0679673254, -0.0110161984, 0.0407784693,
    0.000146685969, -0.0119496426, -0.00169030926, 0.00546364253, -0.00411322759, 0.00420185039, -0.00263898703,
    -0.00597400498, 3.66729569, 5.72667122,
)
_LOG_GAMMA = (
    -0.00137881364, 0.00173232076, 0.00367667549, -0.00416794792, -0.0055740024, 0.00606823666, 0.00290135108,
    -0.00225592242, -0.00374738406, 0.00462006358, -0.00465358421, 0.00770950131, -0.0129504157, 0.0214557797,
    -0.0372116193, 0.0695620626, -0.149352044, 0.450139314,
)
_I0_NEAR = (
    -0.000851984369, 0.00198147935, -0.00075489498, 0.00122772134, -0.00801823661, 0.0145283015, -0.0188573543,
    0.0286079627, -0.0433178917, 0.0573339835, -0.0694632903, 0.0791650042, -0.0849732459, 0.087354295, -0.0890428722,
    0.0945152193, -0.113004334, 0.207001925,
)
_I0_FAR = (3.62667038e-07, 1.63913489e-06, 1.11121481e-05, 0.000136156028, 0.00336055574, 0.402176499)
_I1_NEAR = (
    -0.00012368281, 0.000307414215, -0.000202626572, 0.00041144219, -0.00169859431, 0.00336142047, -0.00542742107,
    0.00936740078, -0.015614301, 0.0237626415, -0.0336612836, 0.0446594357, -0.0552813113, 0.0637688935, -0.0684825331,
    0.0680575445, -0.0611243397, 0.0446877107,
)
_I1_FAR = (-4.21035026e-07, -2.00978889e-06, -1.5003965e-05, -0.000219168083, -0.00974958111, 0.389398456)
_K0_NEAR = (6.09445223e-08, 4.05566561e-06, 0.000182805554, 0.00505339215, 0.0717770085, 0.340497315, -0.303620785)
_K0_FAR = (
    -2.98271357e-06, 8.85380359e-06, -2.40883401e-05, 9.83178033e-05, -0.00047995674, 0.00303314952, -0.0310714468,
    1.21859539,
)
_K1_NEAR = (-7.08284063e-07, -3.89344968e-05, -0.00138316874, -0.0278542265, -0.243838534, -0.332240969, 0.885088265)
_K1_FAR = (
    3.67429379e-06, -1.12062735e-05, 3.20737454e-05, -0.000138086427, 0.000735947397, -0.00556704123, 0.103349723,
    1.36315191,
)
_J0_NEAR = (
    2.43495482e-08, -4.72342805e-07, 6.85491523e-06, -7.12161927e-05, 0.00048768273, -0.00192108715, 0.00318735559,
)
_J1_NEAR = (
    1.30309641e-09, -2.81945507e-08, 4.62596176e-07, -5.51545281e-06, 4.42186902e-05, -0.000209326725, 0.000432369881,
)
_Y0_NEAR = (
    2.92152464e-07, -7.00983173e-06, 0.000129945562, -0.00180278835, 0.0176353455, -0.111516826, 0.388516396,
    -0.470576376, -0.432655811, 0.483724862,
)
_Y1_NEAR = (
    -4.12529118e-07, 8.76753802e-06, -0.000141417346, 0.00166877732, -0.0134334341, 0.0663469583, -0.16312021,
    0.0910865068, 0.139749393,
)
_P0 = (3.1590605e-07, -2.5277468e-06, 3.49102047e-05, -0.00132747577, 0.998634756)
_Q0 = (2.1620852e-07, -1.01946318e-06, 6.22457674e-06, -6.33565214e-05, 0.00131421583, -0.123614967)
_P1 = (-3.67174806e-07, 3.05567278e-06, -4.57748647e-05, 0.00224144361, 1.00229061)
_Q1 = (-2.42934391e-07, 1.16705326e-06, -7.3539436e-06, 7.89469341e-05, -0.00186485169, 0.373047441)
_AIRY_DECAY = (
    3.52214624e-06, -1.17541513e-05, 3.99341079e-05, -0.000196540932, 0.00127782591, -0.013851596, 0.984618783,
)
_AIRY_SINE = (
    -3.11987674e-06, 5.50076493e-06, -5.54550161e-06, 1.78667669e-05, -6.83467224e-05, 0.000336725847, -0.00354165118,
    0.996021211,
)
_AIRY_COSINE = (
    2.67813289e-06, -3.21718368e-06, -4.07856669e-06, 3.61024081e-06, 6.26126621e-06, -7.67672918e-06, 6.63702713e-06,
    -1.66864866e-05, 4.37635827e-05, -0.000125694045, 0.000474864763, -0.00295878155, 0.0658059046,
)
# fmt: on

_SPECIAL = "torch.special."


def _unary(name: str, expr: str, aten: str = "", torch: str = "") -> None:
    elementwise(name, "self", expr, torch or f"{_SPECIAL}{name}", aten or f"special_{name}")


# erfcx(x) = exp(x²) erfc(x), for x not below 0.
declare_function(
    "scaled_erfc",
    "x",
    Let("t", "1 - 7.5f / (x + 3.75f)"),
    result=f"{polynomial(_SCALED_ERFC, 't')} / (1 + 2 * x)",
)
declare_function(
    "complement_of_erf",
    "x",
    Let("tail", "exp(-x * x) * scaled_erfc(fabs(x))"),
    result="fabs(x) < 0.5f ? 1 - erf(x) : x < 0 ? 2 - tail : tail",
)
# erfinv(x) / x, given w = -log(1 - x²).
declare_function(
    "erfinv_slope",
    "w",
    Let("near", "0.4f * w - 1"),
    Let("far", "(sqrt(w) - 5.86803399f) / 3.63196601f"),
    result=f"w < 5 ? {polynomial(_ERFINV_CENTER, 'near')} : {polynomial(_ERFINV_TAIL, 'far')}",
)
_unary("erfc", "complement_of_erf(a)", "erfc special_erfc", "torch.erfc")
_unary("erfcx", "a < 0 ? 2 * exp(a * a) - scaled_erfc(-a) : scaled_erfc(a)")
_unary(
    "erfinv",
    "fabs(a) == 1 ? a / (1 - fabs(a)) : a * erfinv_slope(-log1p(-a * a))",
    "erfinv special_erfinv",
    "torch.erfinv",
)
_unary("ndtr", "0.5f * complement_of_erf(-0.707106781f * a)")
_unary(
    "log_ndtr",
    "a < -1 ? log(0.5f * scaled_erfc(-0.707106781f * a)) - 0.5f * a * a"
    " : log1p(-0.5f * complement_of_erf(0.707106781f * a))",
)
_unary(
    "ndtri",
    "a == 0 || a == 1 ? (2 * a - 1) / (fabs(a) * (1 - a))"
    " : 1.41421356f * (2 * a - 1) * erfinv_slope(-log(4 * a * (1 - a)))",
)
_unary("entr", "a != a ? a : a > 0 ? -a * log(a) : a == 0 ? 0 : log(0.0f)")

# log |Γ(x)| for x above 0: about its roots 1 and 2, shifted to there, and by Stirling's series.
declare_function(
    "log_gamma_of_positive",
    "x",
    Let("y", "x < 0.5f ? x + 1 : x"),
    Let("t", "0.8f * y - 1.4f"),
    Let("near", f"(y - 1) * (y - 2) * {polynomial(_LOG_GAMMA, 't')} - (x < 0.5f ? log(x) : 0)"),
    Let("r", "1 / x"),
    Let("s", "r * r"),
    Let("far", f"r * {polynomial((1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12), 's')}"),
    result="x < 3 ? near : (x - 0.5f) * (log(x) - 1) + 0.418938533f + far",
)
declare_function(
    "log_gamma",
    "x",
    Let("r", "fabs(x - rint(x))"),
    Let("reflected", "1.14472989f - log(fabs(x)) - log(sin(3.14159265f * r)) - log_gamma_of_positive(fabs(x))"),
    result="x > 0 ? log_gamma_of_positive(x) : x == floor(x) ? -log(0.0f) : reflected",
)
declare_function(
    "digamma_of_positive",
    "x",
    Let("steps", "1 / x + 1 / (x + 1) + 1 / (x + 2) + 1 / (x + 3) + 1 / (x + 4) + 1 / (x + 5)"),
    Let("r", "1 / (x + 6)"),
    Let("s", "r * r"),
    result=f"log(x + 6) - 0.5f * r - s * {polynomial((1 / 252, -1 / 120, 1 / 12), 's')} - steps",
)
declare_function(
    "digamma_of",
    "x",
    Let("reflected", "digamma_of_positive(1 - x) - 3.14159265f / tan(3.14159265f * (x - rint(x)))"),
    result="x == 0 ? -1 / x : x > 0 ? digamma_of_positive(x) : x == floor(x) ? sqrt(x) : reflected",
)
# Hurwitz' zeta function by Euler and Maclaurin's formula, from the term on whose base is 10 or more.
declare_function(
    "hurwitz_zeta",
    "s q",
    Let("skipped", "q < 10 ? ceil(10 - q) : 0"),
    Loop("skipped", {"total": ("0.0f", "total + pow(q + k, -s)")}),
    Let("w", "q + skipped"),
    Let("r", "1 / (w * w)"),
    Let("third", "s * (s + 1) * (s + 2)"),
    Let("fifth", "third * (s + 3) * (s + 4)"),
    Let("odd", "(s * 0.0833333333f - r * (third * 0.00138888889f - r * fifth * 3.30687831e-05f)) / w"),
    Let("sum", "total + pow(w, -s) * (w / (s - 1) + 0.5f + odd)"),
    result="s == 1 ? -log(0.0f) : s < 1 ? log(-1.0f) : q > 0 ? sum : q == floor(q) ? -log(0.0f)"
    " : s == floor(s) ? sum : log(-1.0f)",
)
_unary("lgamma", "log_gamma(a)", "lgamma special_gammaln", "torch.lgamma")
_unary("digamma", "digamma_of(a)", "digamma special_digamma special_psi", "torch.digamma")
elementwise("zeta", "self other", "hurwitz_zeta(a, b)", f"{_SPECIAL}zeta", "special_zeta")
elementwise(
    "polygamma",
    "self",
    "order == 0 ? digamma_of(a) : order == 1 && isinf(a) ? (a > 0 ? 0 : log(-1.0f))"
    " : factor * hurwitz_zeta(order + 1, a)",
    "npu.polygamma",
    "npu.polygamma",
    order=0.0,
    factor=1.0,
)

MOST_DERIVATIVES = 33  # beyond it, their factorial is no float32


@register_op(
    "aten.polygamma aten.special_polygamma",
    unsupported=lambda node, graph: (
        None if 0 <= node.attrs["n"] <= MOST_DERIVATIVES else f"derivative {node.attrs['n']} of the digamma function"
    ),
    layout=Layout.ELEMENTWISE,
    shard=shard_elementwise,
)
def lower_polygamma(ctx: Lowering, node: OpNode) -> None:
    """Lower (-1)ⁿ⁺¹ n! ζ(n + 1, x), or the digamma function for n = 0."""
    order = node.attrs["n"]
    factor = float((-1) ** (order + 1) * math.factorial(order))
    ctx.elementwise("polygamma", [ctx.view(node.inputs[0])], ctx.output(), {"order": float(order), "factor": factor})


@register_op("aten.mvlgamma aten.special_multigammaln", layout=Layout.ELEMENTWISE, shard=shard_elementwise)
def lower_mvlgamma(ctx: Lowering, node: OpNode) -> None:
    """Lower the multivariate log-gamma function: Σ log Γ(x - i / 2) for i below p, plus a constant."""
    view, out, count = ctx.view(node.inputs[0]), ctx.output(), node.attrs["p"]
    total: View | float = count * (count - 1) / 4 * math.log(math.pi)
    for index in range(count):
        moved, value = ctx.temp(view.shape, "float32"), ctx.temp(view.shape, "float32")
        ctx.elementwise("sub", [view, index / 2], moved)
        ctx.elementwise("lgamma", [moved], value)
        target = out if index == count - 1 else ctx.temp(view.shape, "float32")
        ctx.elementwise("add", [value, total], target)
        total = target


# The modified Bessel functions, times exp(-x) those of the first kind and exp(x) those of the second; x above 0.
for _order, _near, _far in ((0, _I0_NEAR, _I0_FAR), (1, _I1_NEAR, _I1_FAR)):
    declare_function(
        f"scaled_i{_order}",
        "x",
        Let("t", "0.25f * x - 1"),
        Let("u", "16 / x - 1"),
        result=f"x < 8 ? {'x * ' * _order}{polynomial(_near, 't')} : {polynomial(_far, 'u')} / sqrt(x)",
    )
declare_function(
    "scaled_k0",
    "x",
    Let("t", "0.5f * x * x - 1"),
    Let("u", "4 / x - 1"),
    Let("near", f"exp(x) * ({polynomial(_K0_NEAR, 't')} - log(0.5f * x) * exp(x) * scaled_i0(x))"),
    result=f"x == 0 ? -log(x) : x < 2 ? near : {polynomial(_K0_FAR, 'u')} / sqrt(x)",
)
declare_function(
    "scaled_k1",
    "x",
    Let("t", "0.5f * x * x - 1"),
    Let("u", "4 / x - 1"),
    Let("near", f"exp(x) * ({polynomial(_K1_NEAR, 't')} / x + log(0.5f * x) * exp(x) * scaled_i1(x))"),
    result=f"x == 0 ? -log(x) : x < 2 ? near : {polynomial(_K1_FAR, 'u')} / sqrt(x)",
)
_I0, _I1 = "exp(fabs(a)) * scaled_i0(fabs(a))", "(a < 0 ? -exp(-a) : exp(a)) * scaled_i1(fabs(a))"
_unary("i0", _I0, "i0 special_i0")
_unary("i0e", "scaled_i0(fabs(a))")
_unary("i1", _I1)
_unary("i1e", "(a < 0 ? -1 : 1) * scaled_i1(fabs(a))")
_unary("modified_bessel_i0", _I0)
_unary("modified_bessel_i1", _I1)
for _order in (0, 1):
    _unary(f"modified_bessel_k{_order}", f"exp(-a) * scaled_k{_order}(a)")
    _unary(f"scaled_modified_bessel_k{_order}", f"scaled_k{_order}(a)")

# The Bessel functions: beyond 5 by amplitude and phase, about 0 between their first two roots, or the logarithm's.
declare_function(
    "bessel_wave",
    "x first second turn",
    Let("phase", "x - turn"),
    result="0.797884561f / sqrt(x) * (first * cos(phase) - second / x * sin(phase))",
)
for _order, _p, _q, _between, _roots, _turn in (
    (0, _P0, _Q0, _J0_NEAR, (5.783185963, 30.47126234), 0.785398163),
    (1, _P1, _Q1, _J1_NEAR, (14.68197064, 49.21845632), 2.35619449),
):
    _first, _second = polynomial(_p, "u"), polynomial(_q, "u")
    declare_function(f"bessel_p{_order}", "x", Let("u", "50 / (x * x) - 1"), result=_first)
    declare_function(f"bessel_q{_order}", "x", Let("u", "50 / (x * x) - 1"), result=_second)
    declare_function(
        f"bessel_j{_order}_of",
        "x",
        Let("z", "x * x"),
        Let("t", "0.08f * z - 1"),
        Let("near", f"{'x * ' * _order}(z - {_roots[0]}f) * (z - {_roots[1]}f) * {polynomial(_between, 't')}"),
        result=f"x < 5 ? near : bessel_wave(x, bessel_p{_order}(x), bessel_q{_order}(x), {_turn}f)",
    )
_unary("bessel_j0", "bessel_j0_of(fabs(a))")
_unary("bessel_j1", "(a < 0 ? -1 : 1) * bessel_j1_of(fabs(a))")
declare_function(
    "bessel_y0_of",
    "x",
    Let("t", "0.08f * x * x - 1"),
    Let("near", f"{polynomial(_Y0_NEAR, 't')} + 0.636619772f * log(x) * bessel_j0_of(x)"),
    result="x < 5 ? near : bessel_wave(x, bessel_q0(x) / x, bessel_p0(x) * -x, 0.785398163f)",
)
declare_function(
    "bessel_y1_of",
    "x",
    Let("t", "0.08f * x * x - 1"),
    Let("near", f"x * {polynomial(_Y1_NEAR, 't')} + 0.636619772f * (log(x) * bessel_j1_of(x) - 1 / x)"),
    result="x == 0 ? log(x) : x < 5 ? near : bessel_wave(x, bessel_q1(x) / x, bessel_p1(x) * -x, 2.35619449f)",
)
_unary("bessel_y0", "bessel_y0_of(a)")
_unary("bessel_y1", "bessel_y1_of(a)")
declare_function(
    "spherical_series", "s", result=polynomial((-1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1), "s")
)
_unary(
    "spherical_bessel_j0",
    "isinf(a) ? 0 : fabs(a) < 0.5f ? spherical_series(a * a) : sin(a) / a",
)

# Airy's function: its Taylor series about 0, a decay above and a wave below it.
declare_function(
    "airy_series",
    "x",
    Let("z", "x * x * x"),
    Loop(
        "12",
        {
            "even": ("1.0f", "even * z / ((3 * k + 2) * (3 * k + 3))"),
            "odd": ("x", "odd * z / ((3 * k + 3) * (3 * k + 4))"),
            "total": (
                "0.355028054f - 0.258819404f * x",
                "total + 0.355028054f * even * z / ((3 * k + 2) * (3 * k + 3))"
                " - 0.258819404f * odd * z / ((3 * k + 3) * (3 * k + 4))",
            ),
        },
    ),
    result="total",
)
declare_function(
    "airy",
    "x",
    Let("r", "sqrt(fabs(x))"),
    Let("zeta", "0.666666667f * r * fabs(x)"),
    Let("t", "4.02863727f / zeta - 1"),
    Let("decay", f"0.282094792f / sqrt(r) * exp(-zeta) * {polynomial(_AIRY_DECAY, 't')}"),
    Let("u", "8.11495899f / (zeta * zeta) - 1"),
    Let("sine", f"{polynomial(_AIRY_SINE, 'u')} * sin(zeta + 0.785398163f)"),
    Let("cosine", f"{polynomial(_AIRY_COSINE, 'u')} / zeta * cos(zeta + 0.785398163f)"),
    result="isinf(x) ? log(-1.0f) : x < -2.09f ? 0.564189584f / sqrt(r) * (sine - cosine)"
    " : x > 2.09f ? decay : airy_series(x)",
)
_unary("airy_ai", "airy(a)")

# Orthogonal polynomials, each from the two before: (u + v k) times the last less (w + z k) times the one before, all
# of it divided by 1 + d k.
declare_function(
    "orthogonal",
    "n first u v w z d",
    Let("degree", "trunc(n)"),
    Loop(
        "degree - 1",
        {
            "before": ("1.0f", "last"),
            "last": ("first", "((u + v * (k + 1)) * last - (w + z * (k + 1)) * before) / (1 + d * (k + 1))"),
        },
    ),
    result=f"degree < 0 ? 0 : degree == 0 ? 1 : degree > {MOST_ROUNDS} ? log(-1.0f) : last",
)
declare_function(
    "chebyshev_t", "x n", result="n > 6 && fabs(x) < 1 ? cos(trunc(n) * acos(x)) : orthogonal(n, x, 2 * x, 0, 1, 0, 0)"
)
declare_function(
    "chebyshev_u",
    "x n",
    Let("angle", "acos(x)"),
    result="n > 8 && fabs(x) < 1 ? sin((trunc(n) + 1) * angle) / sin(angle) : orthogonal(n, 2 * x, 2 * x, 0, 1, 0, 0)",
)
declare_function(
    "chebyshev_v",
    "x n",
    Let("angle", "acos(x)"),
    result="n > 8 && fabs(x) < 1 ? cos((trunc(n) + 0.5f) * angle) / cos(0.5f * angle)"
    " : orthogonal(n, 2 * x - 1, 2 * x, 0, 1, 0, 0)",
)
declare_function(
    "chebyshev_w",
    "x n",
    Let("angle", "acos(x)"),
    result="n > 8 && fabs(x) < 1 ? sin((trunc(n) + 0.5f) * angle) / sin(0.5f * angle)"
    " : orthogonal(n, 2 * x + 1, 2 * x, 0, 1, 0, 0)",
)
for _kind in "tuvw":
    for _prefix, _x in (("", "a"), ("shifted_", "2 * a - 1")):
        _name = f"{_prefix}chebyshev_polynomial_{_kind}"
        elementwise(_name, "x n", f"chebyshev_{_kind}({_x}, b)", f"{_SPECIAL}{_name}", f"special_{_name}")
for _name, _expr in {
    "hermite_polynomial_h": "b > 128 ? log(-1.0f) : orthogonal(b, 2 * a, 2 * a, 0, 0, 2, 0)",
    "hermite_polynomial_he": "b > 128 ? log(-1.0f) : orthogonal(b, a, a, 0, 0, 1, 0)",
    "laguerre_polynomial_l": "orthogonal(b, 1 - a, 1 - a, 2, 0, 1, 1)",
    "legendre_polynomial_p": "orthogonal(b, a, a, 2 * a, 0, 1, 1)",
}.items():
    elementwise(_name, "x n", _expr, f"{_SPECIAL}{_name}", f"special_{_name}")
