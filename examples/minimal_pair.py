"""A minimal pair in a script: which words change where each head of a model looks, and the maps as a page.

    python examples/minimal_pair.py

Swaps the adjective of one sentence, prints the largest changes of attention at the answer position, and writes the
figure to minimal_pair.html, which needs no network.
"""

from pathlib import Path

import workbench as wb
from circuits import attention_maps
from workbench.figures import attention_figure, figure_html

run = wb.load("winograd-2")
sentence = "the animal did not cross the street because it was too {} , so the"
tired, wet = (run.encode(sentence.format(adjective)) for adjective in ("tired", "wet"))
maps_tired, maps_wet = attention_maps(run.model, tired), attention_maps(run.model, wet)
words = run.str_tokens(tired)

change = (maps_wet.patterns - maps_tired.patterns)[:, :, run.task.answer_position]  # [layer, head, source]
for flat in change.abs().flatten().argsort(descending=True)[:6].tolist():
    layer, rest = divmod(flat, change[0].numel())
    head, source = divmod(rest, change.shape[2])
    print(f"head {layer}.{head}: {change[layer, head, source]:+.2f} on {source} ‘{words[source]}’")

figure = attention_figure(
    maps_tired, words, maps_wet, run.str_tokens(wet), vocabulary=run.task.vocabulary.words, roles=run.task.roles
)
Path("minimal_pair.html").write_text(figure_html(figure, "tired, wet"), encoding="utf-8")
