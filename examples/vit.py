"""Fine-tune a pretrained ViT on a folder of images, in bfloat16, with batches that do not fit into memory at once.

python examples/vit.py images/     # images/CLASS/*.jpg; needs torchvision, and downloads the model once
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import quell
from quell.torch import make_private


def data(folder: str | None) -> tuple[Dataset, int]:
    if folder is None:
        y = torch.arange(80) % 4
        return TensorDataset(0.3 * torch.randn(80, 3, 32, 32) + y.view(-1, 1, 1, 1), y), 4
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    scale = transforms.Normalize([0.5] * 3, [0.5] * 3)  # constants, nothing measured on the images
    steps = [transforms.Resize(224), transforms.CenterCrop(224), transforms.ToTensor(), scale]
    images = ImageFolder(folder, transforms.Compose(steps))
    return images, len(images.classes)  # the names of the classes become public


def network(small: bool, classes: int) -> ViTForImageClassification:
    if small:
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=classes, **size))
    model = ViTForImageClassification.from_pretrained("google/vit-base-patch16-224-in21k", num_labels=classes)
    model.vit.embeddings.requires_grad_(False)  # fewer trained parameters, less noise
    return model


def main(folder: str | None = None) -> float:
    small, device = folder is None, "cuda" if torch.cuda.is_available() else "cpu"
    images, classes = data(folder)
    plan = quell.plan(
        examples=len(images),
        batch_size=16 if small else 1024,
        epochs=2 if small else 5,
        epsilon=8,
        delta=1e-5,
        momentum=0.9,
        sampling="cyclic" if small else "best",
    )
    model = network(small, classes).to(device)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    loader = DataLoader(images, num_workers=0 if small else 8)
    model, optimizer, loader = make_private(
        model, optimizer, loader, plan, max_grad_norm=1.0, physical_batch_size=8 if small else 128
    )
    for epoch in range(plan.epochs):
        for pixels, labels in loader:  # a batch comes in parts; the step acts after the last one
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                logits = model(pixel_values=pixels.to(device)).logits
            functional.cross_entropy(logits.float(), labels.to(device)).backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {plan.epochs}")
    print(optimizer.privacy_report())
    return optimizer.privacy_report().steps_done / plan.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="images/CLASS/*.jpg")
    parser.add_argument("--small", action="store_true", help="a tiny model on made-up images")
    given = parser.parse_args()
    if given.folder is None and not given.small:
        parser.error("give a folder of images, or --small")
    main(None if given.small else given.folder)
