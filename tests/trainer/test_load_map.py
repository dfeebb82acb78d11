import json
from types import SimpleNamespace

import torch

from trainer.load_map import LoadMap, heat


def test_colours_name_the_load():
    colours = heat(torch.tensor([[1.0, 4.0, 0.25, 0.0, 100.0]]))[0].tolist()
    assert colours == [[255, 255, 255], [255, 0, 0], [0, 0, 255], [0, 0, 0], [255, 0, 0]]


def test_counts_and_pictures_are_written(tmp_path):
    images = []
    writer = SimpleNamespace(add_image=lambda tag, image, step, dataformats: images.append((tag, image.shape, step)))
    load_map = LoadMap(SimpleNamespace(path=tmp_path), writer)
    for step in (10, 20):
        load_map.log(step, torch.tensor([[3, 5], [8, 0], [0, 0]]))
    load_map.close()
    lines = [json.loads(line) for line in (tmp_path / "moe_loads.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 20, "counts": [[3, 5], [8, 0], [0, 0]]}
    assert images[-2:] == [("moe/load", (24, 16, 3), 20), ("moe/drift", (16, 48, 3), 20)]
