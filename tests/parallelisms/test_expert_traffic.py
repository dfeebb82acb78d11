"""What is said of rows between ranks: counts of a step, and layers that only some ranks hold."""

import copy

import pytest
import torch
import torch.distributed as dist

from parallelisms.dispatch_all_to_all import AllToAll
from parallelisms.expert_traffic import expert_traffic, traffic_tags
from tests import ranks
from tests.parallelisms.test_expert_parallel import FLOAT32
from tests.parallelisms.test_parity_expert import EP2, FULL, PARTS, TP2
from tests.parallelisms.test_parity_tensor import sparse
from tests.parallelisms.test_zero import built


def traffic_of_a_step(config) -> tuple[dict, dict[str, float], torch.Tensor]:
    _, model, step, batch = built(copy.deepcopy(config))
    step(batch)
    values = step.experts.report(batch.micro_batches[0], step.forward)
    traffic = expert_traffic(model)
    return traffic, values | traffic_tags(traffic), step.experts.loads


@pytest.mark.parametrize(
    ("layout", "rows"),
    [(EP2, 128), (EP2 | FULL, 128), (EP2 | PARTS, 128), (TP2 | EP2, 64)],
    ids=["kept", "recomputed", "in parts", "each a share of the same tokens"],
)
def test_rows_and_loads_of_ranks_are_reported(layout, rows):
    # One micro-batch a step, so that the latest one is the whole of it: 32 tokens a sequence and 2 choices a token.
    config = sparse(**layout, **FLOAT32, training__global_batch_size=rows // 32)
    (traffic, values, loads), (other, _, _) = ranks.run(2, traffic_of_a_step, config)
    assert traffic == other
    for layer in range(2):
        sent, received = traffic["sent"][layer], traffic["received"][layer]
        assert sent == received[::-1] and min(sent) > 0
        # What arrives and what stays is the load of the rank's experts.
        of_rank = int(loads[layer, :2].sum())
        assert received[0] + (rows - sent[0]) == of_rank
    busiest = max(float(loads.unflatten(1, (2, 2)).sum(-1).amax(1)[layer]) for layer in range(2))
    assert values["moe/device_max_violation"] == pytest.approx(busiest / rows - 1)
    assert values["moe/rows_sent"] == sum(map(sum, traffic["sent"])) / 4
    assert values["moe/rows_received_max"] == max(map(max, traffic["received"]))


def traffic_of_stages() -> tuple[dict, dict[str, float]]:
    """Of a rank that holds one layer of two, the one of its number."""
    rank = dist.get_rank()
    exchange = AllToAll(dist.group.WORLD, 2, overlap=False)
    exchange.rows_sent, exchange.rows_received = 10 * (rank + 1), 7 * (rank + 1)
    block, model = torch.nn.Module(), torch.nn.Module()
    block.moe = torch.nn.Module()
    block.moe.dispatcher = exchange
    model.layers = torch.nn.ModuleDict({str(rank): block})
    traffic = expert_traffic(model)
    return traffic, traffic_tags(traffic)


def test_a_layer_of_another_stage_is_not_one_without_traffic():
    for traffic, tags in ranks.run(2, traffic_of_stages):
        assert traffic == {"sent": [[10, None], [None, 20]], "received": [[7, None], [None, 14]]}
        assert tags == {"moe/rows_sent": 15.0, "moe/rows_received_max": 14.0}
