"""The operator of the functions over sequences of which each rank has a part."""

from torch import Tensor

from pyattn.derivatives.autograd import deterministic
from pyattn.distributed.agreement.call import AgreedCall, Request, agreed
from pyattn.distributed.agreement.checks import check_dims
from pyattn.distributed.agreement.local_options import ParsedOptions
from pyattn.distributed.agreement.ranks import Group
from pyattn.distributed.compiled.operator import (
    FUNCTIONS,
    Given,
    Operator,
    known_error,
    names_of,
    placeholders,
    ranks_named,
    told,
)
from pyattn.distributed.max_score import of_ranks
from pyattn.distributed.partial_results import BackwardInputs, PartialResults
from pyattn.distributed.ring.ring_attention import Ring
from pyattn.distributed.ulysses import Ulysses, by_heads
from pyattn.distributed.usp import by_mesh
from pyattn.options.autocast import cast
from pyattn.options.schema import LEARNED, Options


def compiled(request: Request, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_score) of a call that torch.compile traces."""
    function, tensors, layout, options, max_score, begins, wrong = request
    dims, given = request.dims, [*tensors]
    try:
        if wrong is not None:
            raise wrong
        check_dims(function, tensors, dims)
        parsed = options if isinstance(options, ParsedOptions) else ParsedOptions.of(function, tensors, options)
        error = ""
    except (TypeError, ValueError, NotImplementedError) as problem:
        given, parsed, error = placeholders(tensors, len(dims)), ParsedOptions.nothing(len(tensors)), told(problem)
    place = function.__name__, names_of(group), error, layout, max_score, parsed.chosen, parsed.wanted
    out, lse, *_, most = _attend(*place, *map(cast, given), list(begins), *parsed.options)
    return out, lse, most.detach()


def _agreed(given: Given, options: Options) -> tuple[AgreedCall, Ring | Ulysses]:
    name, layout = given["name"], given["layout"]
    ranks, *parts = ranks_named(given["groups"])
    tensors = given["q"], given["k"], given["v"]
    parsed = ParsedOptions(options, given["chosen"], given["wanted"], in_graph=True)
    request = Request(FUNCTIONS[name], tensors, layout, parsed, given["max_score"], given["begins"], known_error(given))
    call = agreed(request, ranks)
    if name == "usp_attention":
        return call, Ulysses(call, lambda call: by_mesh(call, layout, *parts))
    if name == "ulysses_attention":
        return call, Ulysses(call, lambda call: by_heads(call, layout))
    return call, Ring(call)


def _forward(given: Given, options: Options) -> tuple[PartialResults, Tensor, Options]:
    call, method = _agreed(given, options)
    results, largest = method.forward(call.q, call.k, call.v)
    most = of_ranks(call, largest) if call.max_score else results.row_max.new_empty(0)
    return results, most, call.options


def _backward(
    given: Given, options: Options, dout: Tensor, dlse: Tensor | None, results: PartialResults
) -> list[Tensor | None]:
    call, method = _agreed(given, options)
    wanted = given["wanted"][-len(LEARNED) :]
    return method.backward(BackwardInputs(dout, dlse, call.q, results, wanted, deterministic()), call.k, call.v)


def _shape(given: Given) -> tuple[int, ...]:
    if not given["max_score"]:
        return (0,)
    q = given["q"]
    return q.shape[0] if q.dim() == 4 else given["begins"][0].shape[0] - 1, q.shape[1]


_ARGUMENTS = "str name, str[] groups, str error, str layout, bool max_score, bool chosen, bool[] wanted, "
_ARGUMENTS += "Tensor q, Tensor k, Tensor v, Tensor[] begins"
_attend = Operator("attend", _ARGUMENTS, ("q", "k", "v"), _forward, _backward, _shape).call
