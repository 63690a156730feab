"""The CUDA device: its graphs on a GPU, and what it says where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trencadis.engine import LLM, SamplingParams
from trencadis.engine.devices import CUDADevice, select_device
from trencadis.engine.devices.cuda import sensor_indices
from trencadis.engine.errors import DeviceError, GraphError

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_is_missing():
    with pytest.raises(DeviceError, match="device cuda") as raised:
        select_device("cuda")
    assert "\n" not in str(raised.value)


class TestOnAGPU:
    pytestmark = gpu

    @pytest.fixture
    def device(self):
        return CUDADevice()

    @torch.inference_mode()
    def test_a_replay_gives_what_the_module_gives(self, device):
        module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
        module.to(device.torch_device)
        graph = device.capture(module, [torch.zeros(3, 8, device=device.torch_device)])
        for _ in range(3):
            rows = torch.randn(3, 8, device=device.torch_device)
            torch.testing.assert_close(graph.replay([rows]), module(rows))
        with pytest.raises(GraphError, match="recorded for inputs"):
            graph.replay([rows[:1]])
        graph.release()
        with pytest.raises(GraphError, match="released"):
            graph.replay([rows])

    @torch.inference_mode()
    def test_graphs_share_a_pool(self, device):
        def run(x):
            for _ in range(4):
                x = torch.relu(x * 2)
            return x.sum(1)

        sizes = [4096, 2048, 1024, 512]
        grown = []
        for size in sizes:
            given = torch.ones(size, 1024, device=device.torch_device)
            before = device.free_memory()
            kept = device.capture(run, [given])
            grown.append(before - device.free_memory())
            assert kept.replay([given])[0].item() == 1024 * 16
        # The largest comes first: the others fit into what it took, but for their own inputs.
        assert sum(grown[1:]) < 2 * grown[0]

    def test_memory_that_pytorch_holds_unused_counts_as_free(self, device):
        free = device.free_memory()
        held = torch.empty(64 << 20, dtype=torch.uint8, device=device.torch_device)
        assert free - device.free_memory() >= 64 << 20
        del held
        assert abs(device.free_memory() - free) < 64 << 20
        assert device.free_memory() <= device.total_memory()

    def test_auto_takes_it(self):
        assert select_device("auto").name == "cuda"

    def test_the_same_requests_give_the_same_tokens_as_on_the_cpu(self, tiny_model):
        def tokens(device):
            llm = LLM(
                str(tiny_model),
                device=device,
                dtype="float32",
                max_model_len=64,
                block_size=8,
                max_num_seqs=2,
            )
            answers = llm.generate(["abc", "abd"], SamplingParams(temperature=0, max_tokens=8))
            return [answer.completions[0].token_ids for answer in answers]

        assert tokens("cuda") == tokens("cpu")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, (1,)), ("4,7", (7,)), ("4, 7", (7,)), ("GPU-3f,GPU-5a", None), ("4", None)],
)
def test_the_sensor_of_a_device_is_found_among_those_of_the_machine(
    visible: str | None, indices: tuple[int, ...] | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert sensor_indices(1, environ) == indices
