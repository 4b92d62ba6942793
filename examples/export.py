"""Export a trained network for serving: as a program of torch.export, and with `--onnx` as an ONNX file.

    python examples/export.py
    python examples/export.py --onnx     needs `pip install 'treadle[onnx]'`

`forward` is what is exported. The batch size stays free; all other sizes are fixed.
"""

import sys

import torch
from digits import DigitsTask, build_loaders

import treadle as tl

tl.seed_everything(0)
train, val, test = build_loaders(64)
task = DigitsTask()
trainer = tl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(task, train, val)

images, labels = next(iter(test))
sizes = {"images": {0: torch.export.Dim("batch")}}
task.to_torch_export("digits.pt2", images, dynamic_shapes=sizes)
program = torch.export.load("digits.pt2").module()  # needs neither Treadle nor the code of the task
with torch.no_grad():
    for count in (1, 10, 64):
        torch.testing.assert_close(program(images[:count]), task(images[:count]))
trainer.print(f"digits.pt2 reads {(program(images).argmax(-1) == labels).float().mean():.3f} of 64 images")

if "--onnx" in sys.argv:
    from onnx.reference import ReferenceEvaluator

    task.to_onnx("digits.onnx", images, dynamic_shapes=sizes)
    session = ReferenceEvaluator("digits.onnx")
    (logits,) = session.run(None, {session.input_names[0]: images[:10].numpy()})
    torch.testing.assert_close(torch.tensor(logits), task(images[:10]).detach(), rtol=1e-3, atol=1e-3)
    trainer.print("digits.onnx gives the same logits")
