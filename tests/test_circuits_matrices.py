"""Circuits against brute force: the model's own scores, contributions and logits, and dense products."""

import itertools

import pytest
import torch
from support import build, from_native, gpt2_bridge, native_bridge

import circuits.matrices
import workbench as wb
from circuits.errors import NoSuchPart, Undefined
from circuits.matrices import W_OV, W_QK, direct_path, ov_circuit, qk_circuit, virtual_weights
from circuits.surface import folded
from workbench.tasks.generated import Bigram

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PLAIN = {"norm": "none", "d_mlp": 0, "n_layers": 1}


def run(model):
    with torch.no_grad():
        return model.run_with_cache(TOKENS)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_the_four_qk_circuits_sum_to_the_scores(positions):
    model = build(positions=positions, **PLAIN)
    _, cache = run(model)
    t, p = TOKENS[0], torch.arange(8)
    total = torch.zeros(8, 8)
    for destination, source in itertools.product(("token", "position"), repeat=2):
        part = qk_circuit(model, "0.1", destination=destination, source=source).dense()
        total += part[(t if destination == "token" else p)[:, None], (t if source == "token" else p)[None]]
    seen = torch.ones(8, 8).tril().bool()
    scores = cache["blocks.0.attn.hook_attn_scores"][0, 1]
    assert torch.allclose(total[seen] / model.config.d_head**0.5, scores[seen], atol=1e-5)


def test_shortformer_positions_have_qk_circuits_and_are_not_written_to_the_stream():
    model = build(positions="shortformer", **PLAIN)
    expected = (model.W_pos @ model.W_Q[0, 0]) @ (model.W_pos @ model.W_K[0, 0]).T
    circuit = qk_circuit(model, "0.0", destination="position", source="position")
    assert torch.allclose(circuit.dense(), expected, atol=1e-5)
    with pytest.raises(Undefined, match="positions are not written"):
        virtual_weights(model, "pos", "unembed")


@pytest.mark.parametrize("positions", ["rotary", "alibi", "none"])
def test_a_positional_circuit_is_undefined_where_positions_are_not_vectors(positions):
    model = build(positions=positions, **PLAIN)
    with pytest.raises(Undefined, match=f"{'no' if positions == 'none' else positions} positions"):
        qk_circuit(model, "0.0", source="position")
    qk_circuit(model, "0.0")


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_token_circuits_hold_at_distance_zero_with_rotary_and_alibi_positions(positions):
    model = build(positions=positions, **PLAIN)
    _, cache = run(model)
    own = qk_circuit(model, "0.1")[TOKENS[0]][:, TOKENS[0]].diagonal() / model.config.d_head**0.5
    assert torch.allclose(own, cache["blocks.0.attn.hook_attn_scores"][0, 1].diagonal(), atol=1e-5)


def test_direct_path_and_ov_circuits_sum_to_the_logits_of_one_layer():
    model = build(positions="none", bias_unembed=True, **PLAIN)
    logits, cache = run(model)
    t = TOKENS[0]
    total = direct_path(model)[t] + model.b_O[0] @ model.W_U
    for head in range(2):
        pattern = cache["blocks.0.attn.hook_pattern"][0, head]
        total = total + pattern @ ov_circuit(model, (0, head))[t] + model.b_V[0, head] @ model.W_O[0, head] @ model.W_U
    assert torch.allclose(total, logits[0], atol=1e-4)


def test_a_model_without_layers_is_its_direct_path():
    model = build(n_layers=0, norm="none", positions="none", bias_unembed=True)
    logits, _ = run(model)
    assert torch.allclose(direct_path(model)[TOKENS[0]], logits[0], atol=1e-5)


def test_bigram_0_is_the_log_transition_matrix_up_to_a_row_constant():
    """Its weights against the chain that it was trained on: mean KL ≤ 0.02 nats, no row above 0.1."""
    run = wb.load("bigram-0")
    assert isinstance(run.task, Bigram)
    read_off = direct_path(run.model).dense().log_softmax(-1)
    truth = torch.from_numpy(run.task.transition).float()
    kl = (truth * (truth.log() - read_off)).sum(-1)
    assert kl.mean() <= 0.02
    assert kl.max() <= 0.1


@pytest.mark.parametrize("make", [build, native_bridge, gpt2_bridge, lambda: folded(build())])
def test_factored_matrices_are_the_models_own(make):
    model = make()
    for mine, theirs in (
        (W_QK(model), model.W_Q @ model.W_K.mT), (W_OV(model), model.W_V @ model.W_O),
        (W_QK(model, "1.0"), model.W_Q[1, 0] @ model.W_K[1, 0].T),
        (W_OV(model, (1, 1)), model.W_V[1, 1] @ model.W_O[1, 1]),
    ):  # fmt: skip
        assert torch.allclose(mine.A @ mine.B, theirs, atol=1e-5)


def test_our_circuits_and_a_bridges_are_the_same():
    native = native_bridge()
    ours = from_native(native)
    for circuit in (qk_circuit, ov_circuit):
        a, b = (circuit(folded(model), "1.1").dense() for model in (native, ours))
        assert torch.allclose(a, b, atol=1e-4)
    assert (qk_circuit(ours, "1.1").basis, qk_circuit(folded(ours), "1.1").basis) == ("raw", "folded")


WRITES = {
    "embed": lambda m: m.W_E, "pos": lambda m: m.W_pos, "0.1": lambda m: m.W_V[0, 1] @ m.W_O[0, 1],
    "0.mlp.5": lambda m: m.W_out[0, 5][None],
}  # fmt: skip
READS = {
    "1.0.Q": lambda m: m.W_Q[1, 0], "1.1.K": lambda m: m.W_K[1, 1], "1.0.V": lambda m: m.W_V[1, 0],
    "1.mlp.7": lambda m: m.W_in[1, :, 7][:, None], "0.mlp.2": lambda m: m.W_in[0, :, 2][:, None],
    "0.0.Q": lambda m: m.W_Q[0, 0], "unembed": lambda m: m.W_U,
}  # fmt: skip


def test_virtual_weights_between_every_writer_and_every_later_reader():
    model = build()
    refused = 0
    for (writer, write), (reader, reads) in itertools.product(WRITES.items(), READS.items()):
        too_early = (reader == "0.0.Q" and writer[0].isdigit()) or (writer, reader) == ("0.mlp.5", "0.mlp.2")
        if too_early:
            refused += 1
            with pytest.raises(NoSuchPart, match=f"{reader} reads the residual stream before {writer}"):
                virtual_weights(model, writer, reader)
        else:
            assert torch.allclose(
                virtual_weights(model, writer, reader).dense(), write(model) @ reads(model), atol=1e-5
            )
    assert refused == 3


@pytest.mark.parametrize("chunk", [1, 50, 2**25])
def test_streamed_rows_top_and_diagonal_equal_the_dense_matrix(chunk, monkeypatch):
    monkeypatch.setattr(circuits.matrices, "CHUNK", chunk)
    circuit = ov_circuit(build(), "1.0")
    dense = circuit.dense()
    assert torch.allclose(torch.cat([rows for _, rows in circuit.chunks()]), dense, atol=1e-6)
    assert torch.allclose(circuit.diagonal(), dense.diagonal(), atol=1e-5)
    assert torch.allclose(circuit[3, [1, 2]], dense[3, [1, 2]], atol=1e-6)
    for largest in (True, False):
        rows, columns, values = circuit.top(7, largest=largest)
        assert torch.allclose(values, dense.flatten().topk(7, largest=largest).values, atol=1e-6)
        assert torch.allclose(dense[rows, columns], values, atol=1e-6)
    assert len(circuit.top(1000)[2]) == 400


def test_parts_that_do_not_exist_are_one_clear_line():
    model, attn_only = build(), build(d_mlp=0)
    for call in (
        lambda: qk_circuit(model, "2.0"), lambda: ov_circuit(model, "0"),
        lambda: virtual_weights(model, "embed", "1.0"), lambda: virtual_weights(model, "embed", "1.0.X"),
        lambda: virtual_weights(model, "0.mlp.64", "unembed"), lambda: virtual_weights(model, "0.mlp.x", "unembed"),
        lambda: virtual_weights(attn_only, "0.mlp.1", "unembed"), lambda: virtual_weights(model, "what", "unembed"),
    ):  # fmt: skip
        with pytest.raises(NoSuchPart) as error:
            call()
        assert "\n" not in str(error.value)
