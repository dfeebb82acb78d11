"""Train a model as a TOML file says. Read top to bottom: with assembly.py, this is the whole of training.

python train.py --job.config_file train_configs/llama_debug.toml --training.steps 5
torchrun --nproc_per_node 2 train.py --job.config_file ...
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when torch first allocates on a GPU

import torch

import titan
from assembly import build_model, build_step
from config.arithmetic import flops_per_token
from config.errors import ConfigError
from config.flavors import resolve_shape
from config.layouts import check_layout_on
from config.load import load
from config.memory_advice import advice_sentence
from config.render import render_dry_run
from config.schema import Config
from config.world import check_devices, check_world, derived, mesh_degrees, smallest_world, world_size_from
from data.build import build_data
from data.pipeline import DataPipeline
from data.tokenizer_files import save_tokenizer
from interchange.export import Ranks
from interchange.runs import check_interchange, export_last
from model.attention_choice import attention_of
from parallelisms import process_group
from parallelisms.expert_traffic import expert_traffic, traffic_tags
from parallelisms.float8 import check_float8, plain_weight
from parallelisms.mesh import Mesh
from parallelisms.names import plain_name
from parallelisms.zero import holder_of_states
from trainer.checkpoint import Checkpointer
from trainer.compilations import Compilations
from trainer.determinism import set_determinism
from trainer.environment import read_clocks
from trainer.load_map import LoadMap
from trainer.loss_watch import LossWatch, NonFiniteLoss
from trainer.memory_snapshot import out_of_memory
from trainer.metrics import Metrics
from trainer.profiling import Profiler
from trainer.record import describe_run
from trainer.run_directory import TOKENIZER, RunDirectory, open_run_directory, run_directory_state
from trainer.schedule import set_learning_rate
from trainer.spans import CHECKPOINT, DATA, VALIDATION, span
from trainer.step_timer import StepTimer
from trainer.validation import validate

logger = logging.getLogger("train")

SECONDS_TO_SPEAK = 5.0
"""Ranks that print nothing end this much later: torchrun ends all as soon as one has, also one about to say why."""


def pick_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU on a machine without one. ConfigError: more ranks on the machine than GPUs."""
    available = torch.cuda.device_count()
    check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available, "cuda" if available else "cpu")
    return torch.device("cuda", local_rank) if available else torch.device("cpu")


def train(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    pipeline: DataPipeline,
    run: RunDirectory | None,
    watch: LossWatch,
    profiler: Profiler,
) -> None:
    """Build everything and train to the last step. ``run`` is None on the ranks that write nothing."""
    set_determinism(enabled=config.debug.deterministic, warn_only=config.debug.deterministic_warn_only)
    process_group.join(mesh, device, timeout_seconds=config.comm.init_timeout_seconds)
    run_dir = Path(process_group.from_first_rank("" if run is None else str(run.path)))
    profiler.open(run_dir)
    steps, shape = config.training.steps, resolve_shape(config.model, config.moe)
    model = build_model(config, mesh, device)
    step_once = build_step(config, model, mesh, device, watch.accept)
    held_out = pipeline.validation() if config.validation.enable else None
    metrics = Metrics(
        run,
        config,
        device=device,
        world_size=mesh.world_size,
        tokens_per_step=derived(config, mesh.world_size)["tokens_per_step"].value,
        flops=flops_per_token(shape, config.training.seq_len),
    )

    checkpointer = None
    if config.checkpoint.enable:
        checkpointer = Checkpointer(
            run_dir / config.checkpoint.folder,
            config.checkpoint,
            model=model,
            optimizer=holder_of_states(step_once.optimizer),
            plain_name=plain_name,
            plain_weight=plain_weight,
            parts={"data": pipeline.train, "watch": watch},
            steps=steps,
        )
    done = 0 if checkpointer is None else checkpointer.restore()
    if done:
        metrics.carry_over(done)

    def evaluate() -> dict[str, float]:
        return validate(
            model,
            held_out or (),
            forward=step_once.forward,
            sum_over_ranks=mesh.sum_over_data,
            counts=mesh.cp_rank == 0,
        )

    if held_out is not None and not done:
        metrics.log_validation(0, evaluate())
    experts = step_once.experts
    load_map = LoadMap(run, metrics.writer) if experts is not None and run is not None else None
    collector, compilations = titan.GarbageCollection(config.training.gc_freq), Compilations(speaks=run is not None)
    timer = StepTimer(device, first_step=done + 1)
    fill_rates: list[float] = []  # of the steps since the last log line
    timer.start()
    for step in range(done + 1, steps + 1):
        if reason := profiler.begin(step):
            timer.exclude(reason)
        with timer.waiting_for_data(), span(DATA):
            batch = pipeline.train.next_step()
        rate = set_learning_rate(step_once.optimizer, step - 1, config.optimizer.lr, config.lr_scheduler, steps)
        fill_rates.append(batch.fill_rate)
        with metrics.watching_memory(step):
            result = step_once(batch)
        if compilations.happened():
            timer.exclude("compilation")
        timer.stop()
        if step == steps and run is not None:
            with timer.paused():  # while the device still works
                run.add_to_record(clocks_at_end=read_clocks())
        profile: dict[str, float] = {}
        if profiler.ends(step):
            with timer.paused():
                profile = profiler.end(step)
        validation = None
        if held_out is not None and (step == steps or step % config.validation.freq == 0):
            with timer.paused(), span(VALIDATION):
                validation = evaluate()
        if metrics.should_log(step) or validation is not None or profile:
            with timer.paused():
                loss, local_loss = watch.latest()
                seen = {} if experts is None else experts.report(batch.micro_batches[0], step_once.forward)
                traffic = expert_traffic(model) if mesh.ep > 1 else {}
                if load_map is not None and experts is not None:
                    load_map.log(step, experts.loads, **traffic)
                metrics.log(
                    step,
                    loss=loss,
                    max_loss=titan.dist_max(torch.tensor(local_loss, device=device), mesh.loss_mesh),
                    grad_norm=result.grad_norm.item(),
                    lr=rate,
                    times=timer.collect(),
                    validation=validation,
                    extra=watch.counts()
                    | seen
                    | traffic_tags(traffic)
                    | step_once.passes.report()
                    | compilations.tags()
                    | profile,
                    fill_rates=fill_rates,
                )
                fill_rates.clear()
        if checkpointer is not None and checkpointer.due(step):
            with timer.paused(), span(CHECKPOINT):
                watch.latest()  # a step that is not finite is not saved
                checkpointer.save(step)
        if step == done + 1:
            process_group.set_timeout(mesh, config.comm.train_timeout_seconds)
        collector.run(step)
    if load_map is not None:
        load_map.close()
    if checkpointer is not None:
        checkpointer.wait()
        if config.checkpoint.last_save_in_hf:
            process_group.set_timeout(mesh, config.comm.init_timeout_seconds)  # ranks wait for each other's files
            export_last(config, run_dir, Ranks(mesh.rank, mesh.world_size, process_group.barrier))
    metrics.close()


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code: 0 done, 1 failed, 2 a mistake of the user's."""
    rank, local_rank, world_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(format="%(message)s", level=level, stream=sys.stdout)
    if rank == 0:  # it says how the run ended; the others, who may wait in a collective, end at once
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop ends as Ctrl-C does
    run = None
    try:
        resolved = load(argv)
        config = resolved.config
        if config.job.dry_run:
            if rank == 0:
                print(render_dry_run(resolved, world_size_from() or smallest_world(config)))
            return 0
        check_world(config, world_size)
        check_interchange(config)
        device = pick_device(local_rank)
        check_layout_on(config, device.type, torch.__version__)
        check_float8(config, device.type)
        attention = attention_of(config, device.type)
        if run_directory_state(resolved, opener=rank == 0) == "done":
            logger.info("%s is DONE with this configuration: nothing to do", config.job.run_dir)
            return 0
        mesh = Mesh(rank=rank, **mesh_degrees(config, world_size))
        pipeline = build_data(config, dp_rank=mesh.dp_rank, dp_degree=mesh.dp_degree, pin_memory=device.type == "cuda")
        if rank == 0:
            record = describe_run(
                resolved, mesh.describe(), pipeline.describe(), world_size, device=device.type, attention=attention
            )
            run = open_run_directory(resolved, command=[sys.executable, *sys.argv], record=record)
            if config.checkpoint.enable:  # its weights are of use elsewhere
                save_tokenizer(pipeline.tokenizer, run.path / TOKENIZER)
            for line in record["warnings"]:
                logger.warning("%s", line)
            logger.info("Attention: %s", attention.name)
            logger.info("Run directory: %s", run.path)
    except ConfigError as error:
        if local_rank == 0:
            print(error, file=sys.stderr, flush=True)
        else:
            time.sleep(SECONDS_TO_SPEAK)
        return 2

    skip = config.training.nonfinite_loss == "skip"
    watch = LossWatch(
        mesh.sum_over_data, skip=skip, sum_over_sequence=mesh.sum_over_context, gather=process_group.gather
    )
    profiler = Profiler(
        config.profiling, steps=config.training.steps, rank=rank, device=device, gather=process_group.gather
    )
    status: Literal["done", "failed"] = "failed"
    reason = ""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        train(config, mesh, device, pipeline, run, watch, profiler)
        status = "done"
    except KeyboardInterrupt:
        reason = "interrupted"
    except (ConfigError, NonFiniteLoss) as error:
        reason = str(error)
    except torch.OutOfMemoryError as error:
        reason = out_of_memory(error, step=profiler.step, rank=rank, device=device)
        reason += advice_sentence(config, world_size) + profiler.last_snapshot()
        if run is None:
            print(reason, file=sys.stderr, flush=True)
            time.sleep(SECONDS_TO_SPEAK)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        logger.exception("rank %d failed after step %d", rank, watch.step)
    finally:
        pipeline.close()
        if run is not None:
            run.finish(status, steps=watch.step, reason=reason, skipped_steps=watch.skipped_steps)
            if reason:
                print(f"Stopped after step {watch.step}: {reason}", file=sys.stderr)
        profiler.close()
        process_group.leave()
    return 0 if status == "done" else 1


if __name__ == "__main__":
    sys.exit(main())
