"""The page on two hops as a script: its numbers are the library's, its cuts reach nobody else's pass."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import OTHER_SENTENCE, SENTENCE, app_page, deep_run

import workbench as wb
from circuits import attention_maps, compositions, cut, cuts, decompose_attention_scores, force, two_hops
from circuits.edges import reference
from workbench.content import content
from workbench.figures import arcs_figure, chains_that_matter
from workbench.figures.arcs import chain_words, looks_at, one_decimal
from workbench.figures.composition import z_text
from workbench.pages import cache
from workbench.pages import two_hops_parts as parts
from workbench.pages.cache import Target
from workbench.pages.two_hops_census import census
from workbench.pages.two_hops_cut import FORCE, MEAN, OTHER, ZERO, Cut, held_out, intervene
from workbench.recipes import load_recipe
from workbench.tasks import load
from workbench.training import train

PAGE = {"model": "winograd-2"}


def text(app: Any) -> str:
    return " ".join([*(m.value for m in app.markdown), *(c.value for c in app.caption)])


def figures(app: Any) -> dict[str, Any]:
    """The charts by what is in them."""
    found = {}
    for chart in app.get("plotly_chart"):
        figure = json.loads(chart.proto.spec)
        names = {str(trace.get("name")) for trace in figure["data"]}
        kind = "scores" if "score" in names else "composition" if names <= {"Q", "K", "V"} else "arcs"
        found[kind] = figure
    return found


def tops(figure: dict[str, Any]) -> set[str]:
    return {trace["customdata"][0] for trace in figure["data"] if "customdata" in trace}


@pytest.fixture(scope="module")
def animal() -> dict[str, Any]:
    """Everything about the sentence the page opens on, by the library itself."""
    run = wb.load("winograd-2")
    tokens, words = run.encode(SENTENCE), run.task.vocabulary.words
    target = Target(words.index("animal"), words.index("street"))
    hops = two_hops(run.model, tokens, 14, target.answer, target.foil)
    return {"run": run, "tokens": tokens, "target": target, "hops": hops, "maps": attention_maps(run.model, tokens),
            "names": run.str_tokens(tokens)}  # fmt: skip


def test_the_page_opens_on_the_chains_that_the_library_finds(animal: dict[str, Any]) -> None:
    app, hops = app_page("two_hops", **PAGE), animal["hops"]
    assert not app.error and app.title[0].value == "Two hops"
    clean = float(hops.clean)
    best, value = hops.ranked()[0]
    assert f"animal − street = {one_decimal(clean)} logits" in text(app)
    assert f"{chain_words(best, animal['names'], 14)}: {one_decimal(value)}, the effect of its cut" in text(app)
    v_sum = sum(v for _, v in hops.ranked("V"))
    assert f"V-chains sum to {one_decimal(v_sum)}" in text(app)
    expected = [chain for chain, v in hops.ranked() if abs(v) >= 0.1 * abs(clean)][:12]
    assert tops(figures(app)["arcs"]) == set(map(str, expected)) and len(expected) > 1
    n = sum(chain.kind != "V" for chain in hops.chains)
    assert f"all {n:,} Q- and K-chains cut at once cost {one_decimal(float(hops.together))}" in text(app)
    assert f"interaction {one_decimal(hops.interaction)}" in text(app)
    assert f"Drawn: {len(expected)} of 4,080 chains" in text(app)


def test_score_table_and_composition_maps_hold_the_librarys_numbers(animal: dict[str, Any]) -> None:
    found, run = figures(app_page("two_hops", **PAGE)), animal["run"]
    best, _ = animal["hops"].ranked()[0]
    terms = decompose_attention_scores(run.model, animal["tokens"], best.reader, 14)
    source = int(animal["maps"].patterns[best.reader][14].argmax())
    assert found["scores"]["data"][0]["z"] == pytest.approx(terms.values[:, :, source].double().numpy(), abs=1e-5)
    for trace in found["composition"]["data"]:
        scores = compositions(run.model)[trace["name"]]
        for writer in range(4):
            for reader in range(4):
                inside = not bool(scores.outside[0, writer, 1, reader])
                z = 0 if inside else float(scores.z[0, writer, 1, reader])
                assert trace["z"][writer][reader] == pytest.approx(z, abs=1e-3)
                assert trace["text"][writer][reader] == ("" if inside else z_text(z))


def test_fewer_kinds_and_a_smaller_share_and_another_foil() -> None:
    app = app_page("two_hops", **PAGE, hops_kinds="value", hops_share="2 %", hops_foil="dog", hops_answer="street")
    run = wb.load("winograd-2")
    words = run.task.vocabulary.words
    hops = two_hops(run.model, run.encode(SENTENCE), 14, words.index("street"), words.index("dog"))
    expected = [c for c, v in hops.ranked("V") if abs(v) >= 0.02 * abs(float(hops.clean))][:12]
    assert tops(figures(app)["arcs"]) == set(map(str, expected))
    assert f"street − dog = {one_decimal(float(hops.clean))}" in text(app)
    same = app_page("two_hops", **PAGE, hops_foil="animal")
    assert not same.error and tops(figures(same)["arcs"]) == set() and "animal − animal = 0.0" in text(same)


@pytest.mark.parametrize("kind", ["contribution", "value", "pattern", "knock-out", FORCE])
@torch.no_grad()
def test_the_button_shows_what_the_cut_does_here_and_held_out(animal: dict[str, Any], kind: str) -> None:
    run, target = animal["run"], animal["target"]
    best, _ = animal["hops"].ranked()[0]
    app = app_page("two_hops", **PAGE, hops_kind=kind, hops_hop="both", hops_wide="all heads of the block")
    assert "held-out: " not in text(app)
    app.pills(key="hops_cut").set_value("force it" if kind == FORCE else "cut it").run()
    assert not app.error
    source, looked = 11, looks_at(animal["maps"], best, 14)
    assert best.source == source
    edges = [cuts.Edge(0, None, 14, source), cuts.Edge(1, None, 14, looked)]
    examples = run.examples()
    taken = reference(run.model, examples)

    @contextmanager
    def doing() -> Iterator[None]:
        if kind == FORCE:
            with force(run.model, 0, "all", 14, 0), force(run.model, 1, "all", 14, 0):
                yield
        else:
            with cut(run.model, edges, "mean", what=kind, reference=taken):
                yield

    before, right = run.model(animal["tokens"])[0, 14], examples.judge(run.model(examples.tokens))[0]
    with doing():
        after, still = run.model(animal["tokens"])[0, 14], examples.judge(run.model(examples.tokens))[0]
    words = run.task.vocabulary.words
    said = []
    for logits in (before, after):
        p = logits.softmax(-1)
        said.append(f"**{words[int(p.argmax())]} {100 * float(p.max()):.1f} %**")
    assert f"prediction: {said[0]} → {said[1]}" in text(app)
    gap = [one_decimal(float(logits[target.answer] - logits[target.foil])) for logits in (before, after)]
    assert f"{gap[0]} → **{gap[1]}**" in text(app)
    rates = [f"{100 * each.double().mean():.1f} %" for each in (right, still)]
    assert rates[1] != rates[0] == "100.0 %"
    assert f"held-out: {rates[0]} → **{rates[1]}** (n = 288)" in text(app)
    assert "288 sequences in 36 clusters" in text(app) and "Chance: 50.0 %" in text(app)


@torch.no_grad()
def test_activations_of_the_second_prompt_may_stand_in(animal: dict[str, Any]) -> None:
    run, target = animal["run"], animal["target"]
    edge = (0, None, 14, 11)
    taken = reference(run.model, run.encode(OTHER_SENTENCE))
    with cut(run.model, cuts.Edge(*edge), "resample", reference=taken):
        logits = run.model(animal["tokens"])[0, 14]
    found = intervene(run, SENTENCE, 14, target, Cut((edge,), "contribution", OTHER), OTHER_SENTENCE)
    assert found.after.difference == pytest.approx(float(logits[target.answer] - logits[target.foil]), abs=1e-4)
    assert found.n == 288 and found.accuracy is not None and found.accuracy[0] == 1 > found.accuracy[1]
    with pytest.raises(wb.WorkbenchError, match="no second prompt of the same length"):
        intervene(run, SENTENCE, 14, target, Cut((edge,), "contribution", OTHER))
    nothing = intervene(run, SENTENCE, 14, target, Cut((edge,), "contribution", ZERO))
    with cut(run.model, cuts.Edge(*edge), "zero"):
        logits = run.model(animal["tokens"])[0, 14]
    assert nothing.after.difference == pytest.approx(float(logits[target.answer] - logits[target.foil]), abs=1e-4)


def test_held_out_sequences_at_other_positions_ask_for_the_next_word(animal: dict[str, Any]) -> None:
    run = animal["run"]
    examples = held_out(run, 10)
    assert examples.tokens.shape == (288, 11)
    assert torch.equal(examples.answers, run.task.held_out[:, 11])
    found = intervene(run, SENTENCE, 10, animal["target"], Cut(((0, 0, 10, 9),), "knock-out", ZERO))
    with torch.no_grad():
        right = run.model(run.task.held_out[:, :11])[:, 10].argmax(-1) == run.task.held_out[:, 11]
    assert found.accuracy is not None
    assert found.accuracy[0] == pytest.approx(right.double().mean().item()) and found.n == 288
    end = run.task.held_out.shape[1] - 1
    with pytest.raises(wb.WorkbenchError, match=f"none with a next one at {end}"):
        held_out(run, end)


@pytest.mark.parametrize("locked", [True, False])
def test_a_cut_never_reaches_another_sessions_pass(
    animal: dict[str, Any], monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """One thread is stopped in the middle of a pass through a cut model; another asks the page's functions then.

    With the lock it waits, and what it gets is clean. Without (the control) it runs through the other's cut.
    """
    run, target = animal["run"], animal["target"]
    if not locked:
        for module in ("circuits.attention", "circuits.cuts", "circuits.edges"):
            monkeypatch.setattr(f"{module}.exclusive", lambda model: nullcontext())
    strong = Cut(((0, None, 14, 11),), "knock-out", ZERO)
    inside, finished = threading.Event(), threading.Event()
    early: list[bool] = []
    got: dict[str, Any] = {}
    cutter: list[int] = []
    clean = float(animal["maps"].probabilities[14, target.answer])

    def wait_here(stream: torch.Tensor, hook: Any) -> None:
        """In the cutter's first pass with hooks of a cut on the model."""
        if threading.get_ident() == cutter[0] and not early and model.hook_dict[point].fwd_hooks[1:]:
            inside.set()
            early.append(finished.wait(0.5))

    def cutting() -> None:
        cutter.append(threading.get_ident())
        got["cut"] = intervene(run, SENTENCE, 14, target, strong)

    def reading() -> None:
        inside.wait(60)
        got["maps"] = attention_maps(run.model, animal["tokens"])
        finished.set()

    model: Any = run.model
    point = "blocks.0.attn.hook_pattern"
    model.add_hook(point, wait_here, is_permanent=True)
    try:
        threads = [threading.Thread(target=work) for work in (cutting, reading)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        model.reset_hooks(including_permanent=True)
    read = float(got["maps"].probabilities[14, target.answer])
    assert got["cut"].after.answer < 0.5 < clean
    assert early == [not locked]
    assert (abs(read - clean) < 1e-6) == locked


def test_many_threads_of_the_pages_functions_do_not_mix(animal: dict[str, Any]) -> None:
    run, target, clean = animal["run"], animal["target"], float(animal["hops"].clean)
    strong = Cut(((0, None, 14, 11),), "knock-out", ZERO)
    forced = Cut(((1, None, 14, 6),), FORCE, ZERO, 4)
    expected = {c: intervene(run, SENTENCE, 14, target, c).after.difference for c in (strong, forced)}
    assert all(abs(value - clean) > 1 for value in expected.values())
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(4):
            which = (strong, forced)[number % 2]
            found = intervene(run, SENTENCE, 14, target, which)
            if abs(found.before.difference - clean) > 1e-4 or abs(found.after.difference - expected[which]) > 1e-4:
                wrong.append(f"{which}: {found}")
            few = two_hops(
                run.model, animal["tokens"], 14, target.answer, target.foil, places=[11], heads=["0.0", "1.3"]
            )
            if abs(float(few.clean) - clean) > 1e-4:
                wrong.append(f"two hops: {few.clean}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_choosing_a_chain_and_a_click_on_its_arc(animal: dict[str, Any]) -> None:
    app = app_page("two_hops", **PAGE)
    options = app.selectbox(key="hops_chain").options
    expected = [chain_words(c, animal["names"], 14) for c, _ in chains_that_matter(animal["hops"], 0.1)]
    assert options == expected
    app.selectbox(key="hops_chain").set_value(options[1]).run()
    second = chains_that_matter(animal["hops"], 0.1)[1][0]
    assert app.selectbox(key="hops_head").value == f"{second.reader[0]}.{second.reader[1]}"
    sizes = {
        trace["customdata"][0]: trace["marker"]["size"]
        for trace in figures(app)["arcs"]["data"] if "customdata" in trace
    }  # fmt: skip
    assert max(sizes, key=lambda name: sizes[name]) == str(second)


def test_the_python_of_the_page_makes_its_figure(animal: dict[str, Any]) -> None:
    app = app_page("two_hops", **PAGE)
    code = next(block.value for block in app.code if "two_hops(" in block.value)
    *lines, last = code.strip().splitlines()
    scope: dict[str, Any] = {}
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    best, _ = animal["hops"].ranked()[0]
    expected = arcs_figure(
        animal["hops"], animal["names"], animal["maps"], 14, answer="animal", foil="street", share=0.1, chosen=best,
        roles=animal["run"].task.roles,
    )  # fmt: skip
    assert scope["figure"].to_json() == expected.to_json()


def test_this_seeds_mechanism_is_that_of_the_committed_census(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(content("docs/results/mechanisms.json").read_text())["rows"]
    mine = [row for row in rows if row["model"] == "winograd-2"]
    label = next(row["mechanism"] for row in mine if row["seed"] == 0)
    n = sum(row["mechanism"] == label for row in mine)
    app = app_page("two_hops", **PAGE)
    assert f"This seed: “{label}” · {n} of {len(mine)} seeds of the census" in text(app)
    assert all(row["mechanism"] in text(app) for row in mine)
    found = census(wb.load("induction-2-attn"))
    assert found is not None and found.mine is not None and found.mine["feeds"][0].startswith("0.0→K→")
    assert found.label(found.mine) == "1 head of block 1 feeds the keys of block 2"
    assert sum(len(seeds) for _, seeds in found.counts) == 16
    monkeypatch.setattr("workbench.pages.two_hops_census.content", lambda name: Path("nowhere") / name)
    assert census(wb.load("winograd-2")) is None
    asked = app_page("two_hops", **PAGE)
    assert "This seed:" not in text(asked)
    monkeypatch.setattr(parts, "mechanism_label", lambda key: f"of {key.name}")
    asked.toggle(key="hops_name").set_value(True).run()
    assert "This seed: “of winograd-2” · computed now" in text(asked)


@pytest.mark.parametrize(("name", "words"), [("bigram-0", "has no layers"), ("winograd-1", "has one block")])
def test_models_without_two_blocks_say_what_to_see_instead(name: str, words: str) -> None:
    app = app_page("two_hops", model=name)
    assert words in text(app) and not app.error and not figures(app)
    assert ("winograd-2" in text(app)) == (name == "winograd-1")


@pytest.mark.parametrize(("prompt", "at"), [("the", "the"), ("the the did", "0 the")])
def test_at_the_first_word_there_is_nothing_to_hop(prompt: str, at: str) -> None:
    app = app_page("two_hops", **PAGE, prompt=prompt, at=at)
    assert not app.error and set(figures(app)) == {"composition"}
    then = "write a prompt of two words or more" if prompt == "the" else "choose a later position"
    assert "At 0 ‘the’ there is one word to look at" in text(app) and f"To see chains, {then}." in text(app)


@pytest.mark.parametrize("prompt", ["the dog", "the the the the the", "<script> the"])
def test_short_and_repeated_and_hostile_prompts(prompt: str) -> None:
    app = app_page("two_hops", **PAGE, prompt=prompt)
    assert bool(app.error) == ("script" in prompt)
    if not app.error:
        assert set(figures(app)) == {"arcs", "scores", "composition"}


def test_values_of_a_link_that_are_not_there_fall_back() -> None:
    words = "answer foil kinds share chain hop wide kind put onto cut head source name all lower upper places readers"
    wrong = {f"hops_{name}": "nonsense" for name in words.split()}
    app = app_page("two_hops", **PAGE, **wrong)
    assert not app.error and "animal − street" in text(app)


def mine(**changes: Any) -> None:
    """A run called mine: winograd-2, changed, and hardly trained."""
    recipe = load_recipe("winograd-2")
    model = replace(recipe.model, **changes)
    train(replace(recipe, name="mine", model=model, training=replace(recipe.training, steps=1)))
    cache._entries.clear()


@pytest.mark.parametrize("changes", [{"norm": "post"}, {"residual": False}])
def test_models_in_which_chains_are_undefined_say_so_and_show_the_rest(changes: dict[str, Any], runs: Path) -> None:
    mine(**changes)
    app = app_page("two_hops", model="mine")
    assert app.error and all("\n" not in error.value for error in app.error)
    assert "undefined" in app.error[0].value
    assert any(heading.value == "Who reads whom, from the weights" for heading in app.subheader)


def test_a_deep_model_and_a_long_prompt_stay_usable(tmp_path: Path, runs: Path) -> None:
    deep_run(tmp_path, 200)
    app = app_page("two_hops", model="deep")
    assert not app.error
    assert set(figures(app)) == {"arcs", "scores", "composition"}
    assert all(len(chart.proto.spec) < 4e6 for chart in app.get("plotly_chart"))
    view = app.session_state.view
    assert len(view.run.encode(view.prompt)[0]) > 190
    assert "Heads measured: 10." in text(app) and "Positions measured:" in text(app)
    chosen = [app.multiselect(key=f"hops_{name}").value for name in ("writers", "readers", "places")]
    assert [len(names) for names in chosen[:2]] == [2, 2] and len(chosen[2]) >= 4
    app.multiselect(key="hops_writers").set_value(["10.3"]).run()
    assert not app.error and f"Heads measured: 10.3, {', '.join(chosen[1])}." in text(app)
    app.selectbox(key="hops_lower").set_value("block 2").run()
    assert not app.error and re.search(r"Heads measured: 1\.\d+, 1\.\d+, 11\.", text(app))


@pytest.fixture
def plays(made_up_text: str, runs: Path) -> wb.Run:
    """A text model of byte pairs with two blocks."""
    folder = runs / "recipe"
    folder.mkdir(parents=True)
    (folder / "plays.toml").write_text(
        'task = "shakespeare"\n[model]\nn_layers = 2\nn_heads = 2\nd_model = 16\nd_mlp = 0\n[training]\nsteps = 1\n'
    )
    train(load_recipe(folder / "plays.toml"))
    cache._entries.clear()
    return wb.load("plays")


def test_a_text_that_is_not_here_leaves_the_chains_and_says_why_no_mean(
    plays: wb.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompt = "The king.\n  His fool"
    app = app_page("two_hops", model="plays", prompt=prompt, hops_cut="cut it", hops_share="1 %")
    assert not app.error and "held-out: " in text(app)
    monkeypatch.delenv("WORKBENCH_SHAKESPEARE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    load._load.cache_clear()
    cache.run_of.clear()
    parts.outcome.clear()
    gone = app_page("two_hops", model="plays", prompt=prompt, hops_cut="cut it", hops_share="1 %", pair="none")
    assert set(figures(gone)) == {"arcs", "scores", "composition"}
    (error,) = gone.error
    assert error.value.startswith("no mean to put in: the text of shakespeare is not here")
    gone.selectbox(key="hops_put").set_value(ZERO).run()
    assert not gone.error and "No held-out accuracy: the text of shakespeare is not here" in text(gone)
    assert gone.selectbox(key="hops_put").options == [MEAN, ZERO]
