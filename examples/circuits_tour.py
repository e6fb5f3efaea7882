"""The circuits of four shipped models, read from their weights, each reading beside its null and checked by a cut.

    python examples/circuits_tour.py

Under a minute on one core. docs/circuits.md explains every formula; the figures there are this script's.
"""

import pandas
import torch

import workbench as wb
from circuits import (
    Path,
    composition_scores,
    composition_spectrum,
    copying_score,
    direct_path,
    every_path,
    factoring_bugs,
    head_scores,
    in_context_learning_score,
    path_effects,
    singular_directions,
    skip_trigrams,
)  # fmt: skip
from workbench.tasks.generated import Bigram, SkipTrigram

torch.set_num_threads(1)
pandas.set_option("display.width", 160)


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


title("bigram-0: no layers, so the direct path is all there is")
run = wb.load("bigram-0")
log_probs = direct_path(run.model).dense().log_softmax(-1)
assert isinstance(run.task, Bigram)
truth = torch.from_numpy(run.task.transition).float()
kl = (truth * (truth.log() - log_probs)).sum(-1)
print(f"W_E W_U against the chain's log transition matrix: mean KL {kl.mean():.5f} nats, worst row {kl.max():.4f}")

title("skip-trigram-1-attn: one layer, rules source … destination → out")
run = wb.load("skip-trigram-1-attn")
assert isinstance(run.task, SkipTrigram)
rules = {rule: out for rule, out in run.task.rules.items() if rule not in run.task.latin}
sources = sorted({source for source, _ in rules})
found = skip_trigrams(run.model, source=sources, n=len(rules))
right = sum(rules.get((s, d)) == o for s, d, o in found.tokens.tolist())
print(f"the {len(rules)} best trigrams of {len(sources)} sources, from weights: {right} are rules of the task")
print(f"{int(found.attended.sum())} of them are read by a head; the others are what the model says by default")
columns = [
    "source_name",
    "destination_name",
    "out_name",
    "p",
    "p_without_source",
    "p_other_sources",
    "attended",
    "head",
]
print(found.to_frame()[columns].head(4).to_string(index=False))
bugs = factoring_bugs(run.model, rules)
print(repr(bugs).partition("\n")[0])
columns = ["source_name", "destination_name", "right_name", "wrong_name", "p_right", "p_wrong", "head"]
print(bugs.to_frame()[columns].head(2).to_string(index=False))

title("induction-2-attn: two layers, a repeated segment")
run = wb.load("induction-2-attn")
model, tokens = run.model, run.task.held_out[:256]
heads = head_scores(model)
print(heads)
print(in_context_learning_score(model, tokens))
print(copying_score(model).eigenvalue)
composition = composition_scores(model, "K")
print(composition)
(writer, reader), *_ = composition.ranked()
print(composition_spectrum(model, "K", writer, reader))
print(singular_directions(model, reader, n=2).to_frame(run.task.vocabulary.words).to_string(index=False))

title("… and its cuts: a score says “not random”, a cut says “composes”")
second_half = list(run.task.scored)
paths = [path for path in every_path(model, ("K",)) if path.writer == writer]
print(path_effects(model, tokens, [Path(writer, "K", reader), paths, every_path(model, ("V",))], positions=second_half))
print(path_effects(model, tokens, [Path(writer, "K", reader)], positions=second_half, measure="prefix_matching"))

title("winograd-2: the adjective, through the queries of block 2")
run = wb.load("winograd-2")
queries = composition_scores(run.model, "Q")
print(queries)
(writer, _), *_ = queries.ranked()
together = [path for path in every_path(run.model, ("Q",)) if path.writer == writer]
cuts = [together, every_path(run.model, ("V",))]
tokens, scored = run.task.held_out, list(run.task.scored)
print(path_effects(run.model, tokens, cuts, positions=scored, clusters=run.task.clusters(tokens)))
