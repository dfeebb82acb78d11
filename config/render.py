"""Configurations as text: every value with its origin, two of them side by side, and what a dry run prints."""

from __future__ import annotations

from config.arithmetic import flops_per_token, parameter_counts
from config.estimate import estimate, provenance
from config.flavors import resolve_shape
from config.keys import shown
from config.load import Resolved, flatten
from config.memory import expert_spread
from config.memory_advice import advice
from config.paths import missing_files
from config.pipeline import bubble, rank_modules, stage_modules, stage_ranks
from config.rules import effective, tokenizer_kind
from config.schema import Config
from config.step_memory import held_by
from config.world import DATA_AXES, DEGREES, derived, mesh_degrees

_WIDEST_VALUE = 44


def render(resolved: Resolved) -> str:
    """Every value and where it came from, section by section, aligned. The text is a TOML file that loads again.

    A key that is unset and follows from another stands as a comment with the value it takes and the rule.
    """
    follows = effective(resolved.config)
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for full, value in flatten(resolved.config).items():
        section, origin = full.split(".")[0], resolved.origins.get(full, "default")
        if value is None and full in follows:
            value, origin = follows[full]
            row = (f"# {full}", shown(value), f"from {origin}")
        elif value is None:
            row = (f"# {full}", "unset", origin)
        else:
            row = (full, shown(value), origin)
        sections.setdefault(section, []).append(row)
    if resolve_shape(resolved.config.model, resolved.config.moe).moe is None:
        set_keys = [row for row in sections["moe"] if row[2] != "default"]
        sections["moe"] = [*set_keys, ("# moe.*", "unused", f"flavor {resolved.config.model.flavor} has no experts")]
    return "\n\n".join(_aligned(rows) for rows in sections.values())


def _aligned(rows: list[tuple[str, str, str]]) -> str:
    names = max(len(name) for name, _, _ in rows)
    values = max((len(v) for _, v, _ in rows if len(v) <= _WIDEST_VALUE), default=0)
    return "\n".join(f"{name:<{names}} = {value:<{values}}  # {origin}" for name, value, origin in rows)


def render_diff(a: Resolved, b: Resolved, names: tuple[str, str]) -> str:
    """The keys in which two configurations differ, with both values and their origins; apart from them, what follows.

    What names a run or its file does not count, nor does writing down what would have followed anyway.
    """
    written = (flatten(a.config), flatten(b.config))
    left, right = (
        w | {k: value for k, (value, _) in effective(r.config).items()} for w, r in zip(written, (a, b), strict=True)
    )
    different = [k for k in left if left[k] != right[k] and not k.startswith("job.")]
    set_keys = [k for k in different if written[0][k] != written[1][k]]
    following = [k for k in different if k not in set_keys]
    if not different:
        return f"{names[0]} and {names[1]} say the same."
    rows = {k: (k, shown(left[k]), shown(right[k])) for k in set_keys + following}
    widths = [max(len(row[i]) for row in rows.values()) for i in range(3)]

    def line(full: str) -> str:
        name, one, other = rows[full]
        from_a, from_b = _origin(a, full), _origin(b, full)
        return (
            f"  {name:<{widths[0]}}  {one:>{widths[1]}} -> {other:<{widths[2]}}"
            f"  # {from_a if from_a == from_b else f'{from_a} -> {from_b}'}"
        )

    plural = "1 key differs" if len(set_keys) == 1 else f"{len(set_keys)} keys differ"
    out = [f"{plural}, A = {names[0]} -> B = {names[1]}", *map(line, set_keys)]
    return "\n".join(out + (["what follows", *map(line, following)] if following else []))


def _origin(resolved: Resolved, full: str) -> str:
    rule = effective(resolved.config).get(full)
    return f"from {rule[1]}" if rule else resolved.origins.get(full, "default")


def render_dry_run(resolved: Resolved, world_size: int) -> str:
    """What ``--job.dry_run`` prints: configuration with origins, parameters, FLOPs, tokens a step, memory. No torch.

    Raises:
        ConfigError: the degrees or the global batch do not fit ``world_size`` ranks.
    """
    config = resolved.config
    shape, training = resolve_shape(config.model, config.moe), config.training
    degrees, numbers = mesh_degrees(config, world_size), derived(config, world_size)
    counts, flops = parameter_counts(shape), flops_per_token(shape, training.seq_len)
    on_ranks = rank_modules(config.parallelism, shape.n_layers) if degrees["pp"] > 1 else [None]
    held = max((held_by(config, degrees, modules) for modules in on_ranks), key=lambda each: each.total)
    foreseen = estimate(config, world_size)
    parts = {"embedding": counts.embedding, "blocks": counts.layers, "head": counts.head, "norm": shape.dim}
    in_parts = " + ".join(f"{name} {n:,}" for name, n in parts.items() if n) + ("" if counts.head else ", head tied")
    mesh = " x ".join(f"{axis}({degrees[axis]})" for axis in DEGREES if degrees[axis] > 1 or axis in DATA_AXES)
    if experts := expert_spread(degrees):
        mesh += f"; experts: efsdp({experts.efsdp}) x ep({experts.ep}) x etp({experts.etp})"
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    lines = [
        _heading("Configuration", " <- ".join(str(path) for path in reversed(resolved.files)) or "defaults"),
        render(resolved),
        "",
        _heading("Model", f"{config.model.name} {config.model.flavor}"),
        _row("parameters", f"{counts.total:,}", in_parts),
        *([_row("active a token", f"{counts.active:,}")] if counts.active != counts.total else []),
        _row("FLOPs a token", _scaled(flops.torchtitan), f"torchtitan's formula, at seq_len {training.seq_len:,}"),
        _row("", _scaled(flops.causal_with_head), "causal attention, with the head"),
        _row("tokenizer", tokenizer_kind(config), "data.tokenizer, model.hf_assets_path"),
        "",
        _heading("Step", f"{ranks}: {mesh}"),
        *(_row(name.replace("_", " "), f"{item.value:,}", item.rule) for name, item in numbers.items()),
        *(_pipeline(config, shape.n_layers, numbers["pipeline_micro_batches"].value) if degrees["pp"] > 1 else []),
        "",
        _heading("Memory a rank", "weights and gradients float32"),
        _row("parameters", _bytes(held.parameters)),
        _row("gradients", _bytes(held.gradients)),
        _row(
            "optimizer states",
            _bytes(held.optimizer_states),
            f"{config.optimizer.name}, {config.optimizer.state_dtype}",
        ),
        _row("total", _bytes(held.total)),
        "",
        _heading("Peak active memory a rank", f"{foreseen.fullest.name}; {provenance()}"),
        *(_row(name, _bytes(size)) for name, size in foreseen.parts().items()),
        _row("peak active, estimated", _bytes(foreseen.peak), "the allocator reserves more; docs/memory.md"),
        *(_row("", _bytes(switch.peak), f"with {switch.words}") for switch in advice(config, world_size)),
    ]
    remarks = [*resolved.notes, *(f"not on this machine: {text}" for text in missing_files(config, resolved.origins))]
    if remarks:
        lines += ["", _heading("Notes", ""), *(f"  {text}" for text in remarks)]
    return "\n".join(lines)


def _pipeline(config: Config, n_layers: int, n: int) -> list[str]:
    """The stages of a pipeline and the waiting that its schedule leaves."""
    section = config.parallelism
    stages = stage_modules(section, n_layers)
    layers = [str(sum(module.startswith("layers.") for module in stage)) for stage in stages]
    ranks = [str(rank) for rank in stage_ranks(section, len(stages))]
    return [
        _row("pipeline stages", f"{len(stages)}", f"layers {' '.join(layers)}, on ranks {' '.join(ranks)}"),
        _row("waiting, predicted", f"{100 * bubble(section, n_layers, n):.1f} %", "equal stages, free communication"),
    ]


def _heading(title: str, about: str) -> str:
    return f"== {title}{': ' if about else ''}{about}"


def _row(name: str, value: str, remark: str = "") -> str:
    return f"  {name:<28}{value:>18}" + (f"  # {remark}" if remark else "")


def _scaled(n: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if n >= size:
            return f"{n / size:,.3f} {unit}FLOP"
    return f"{n:,} FLOP"


def _bytes(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
