"""Measured exceptions to the order of backends: what they cover, and the file that holds them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_routing import PROBLEM, Fake, router_of, run

from nsa.backends.gpu import gpu_family
from nsa.backends.measured_routes import MeasuredRoute, load_routes
from nsa.backends.routing import BackendFailure


def test_measured_routes_hold_where_they_were_measured() -> None:
    measured = MeasuredRoute(
        gpu="H200", op="sliding", order=("sdpa", "triton"), min_length=32, max_length=128, head_dims=(16,)
    )
    router = router_of(Fake("triton"), Fake("sdpa"), measured_routes=[measured], gpu="H200")
    on_gpu = replace(PROBLEM, device="cuda", dtype=torch.bfloat16)
    assert router.route(on_gpu).backend == "sdpa"
    assert re.match(r"measured .*H200$", router.route(on_gpu).why)
    elsewhere = [
        PROBLEM,  # a CPU tensor on the GPU's machine
        on_gpu.for_op("compressed"),
        replace(on_gpu, n_queries=31),
        replace(on_gpu, n_queries=129),
        replace(on_gpu, d_k=32),
        replace(on_gpu, d_v=8),
        replace(on_gpu, cached=True),
        replace(on_gpu, dtype=torch.float32),
    ]
    assert [router.route(problem).backend for problem in elsewhere] == ["triton"] * 8
    for gpu, backend in (("A100", "triton"), ("H200 NVL", "sdpa"), ("GH200 480GB", "triton")):
        other = router_of(Fake("triton"), Fake("sdpa"), measured_routes=[measured], gpu=gpu)
        assert other.route(on_gpu).backend == backend, gpu


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 PCIe", "NVIDIA H100"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_a_family_is_a_gpu_whatever_its_memory_and_slot(name: str, family: str) -> None:
    assert gpu_family(name) == family


def test_a_backend_not_listed_in_a_route_keeps_its_place() -> None:
    measured = MeasuredRoute(gpu="cpu", op="sliding", order=("reference", "sdpa"))
    router = router_of(Fake("triton"), Fake("sdpa"), Fake("reference"), measured_routes=[measured])
    assert router.order(PROBLEM)[0] == ["triton", "reference", "sdpa"]


def test_a_measured_route_may_hold_for_one_direction() -> None:
    measured = MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa", "triton"), mode="bwd")
    router = router_of(Fake("triton"), Fake("sdpa"), measured_routes=[measured])
    assert router.route(PROBLEM).backend == "triton"
    assert router.route(replace(PROBLEM, backward=True)).backend == "sdpa"


@pytest.mark.parametrize("varlen", [True, False])
def test_a_measured_route_may_hold_for_one_layout(varlen: bool) -> None:
    measured = MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa", "triton"), varlen=varlen)
    router = router_of(Fake("triton"), Fake("sdpa"), measured_routes=[measured])
    assert router.route(replace(PROBLEM, varlen=varlen)).backend == "sdpa"
    assert router.route(replace(PROBLEM, varlen=not varlen)).backend == "triton"


def test_after_a_failure_the_others_of_a_route_run() -> None:
    measured = MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa", "triton"))
    backends = Fake("triton"), Fake("sdpa", raises=BackendFailure("no"))
    assert run(router_of(*backends, measured_routes=[measured])) == "triton"


def test_the_file_of_routes_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    assert load_routes(path) == ()
    row = {"gpu": "NVIDIA H200", "op": "sliding", "order": ["flash", "triton"], "min_length": 4096}
    expected = MeasuredRoute(
        gpu="NVIDIA H200", op="sliding", order=("flash", "triton"), min_length=4096, head_dims=(64,), varlen=True
    )
    # Files of earlier versions have other names.
    old = {"preferences": [row | {"head_widths": [64], "packed": True}]}
    for content in ({"routes": [row | {"head_dims": [64], "varlen": True}]}, old):
        path.write_text(json.dumps({"measured": "by a benchmark", **content}))
        assert load_routes(path) == (expected,)
    wrong = [
        ({"min_len": 1}, "'min_len'"),
        ({"op": "attend"}, "op is 'attend'"),
        ({"order": ["tritno"]}, "'tritno'"),
        ({"order": ["sdpa", "sdpa"]}, "order is"),
        ({"order": []}, "order is"),
        ({"mode": "both"}, "mode is 'both'"),
        ({"varlen": 0}, "varlen is 0"),
        ({"min_length": "4096"}, "min_length is '4096'"),
        ({"max_length": 4095}, "max_length is 4095"),
        ({"head_dims": 64}, "head_dims is 64"),
        ({"head_dims": ["64"]}, "head_dims is"),
        ({"head_dims": []}, "head_dims is"),
        ({"gpu": 3}, "gpu is 3"),
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, "gpu is 'NVIDIA A100-SXM4-80GB'"),
    ]
    contents = [([], "routes"), ({"routes": [{"gpu": "x"}]}, "missing")]
    for content, message in [*contents, *(({"routes": [row | change]}, message) for change, message in wrong)]:
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message) as error:
            load_routes(path)
        assert str(path) in str(error.value)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="RecursionError") as error:
        load_routes(path)
    assert str(path) in str(error.value)
