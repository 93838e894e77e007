"""Models of timm and torchvision: a vision transformer, a residual network and a detector."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from zoo.packages import use_packages

CLASSES = 4
CHANNELS, SIDE = 3, 32


class Labelled(Dataset[Any]):
    """Images, each with a class and a box."""

    def __init__(self, number: int) -> None:
        chance = torch.Generator().manual_seed(1)
        self.images = torch.rand(number, CHANNELS, SIDE, SIDE, generator=chance)
        self.corners = torch.randint(SIDE // 2, (number, 2), generator=chance)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.corners[index]


def loader() -> DataLoader[Any]:
    return DataLoader(Labelled(32), batch_size=4)


class Classifier(pl.LightningModule):
    """A model of timm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, corners = batch
        loss = nn.functional.cross_entropy(self.model(images), corners.sum(1) % CLASSES)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Detector(Classifier):
    """A detector of torchvision, which takes lists of images and of dicts, and returns a dict of losses."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, corners = batch
        boxes = torch.cat([corners, corners + 12], 1).float()
        targets = [
            {"boxes": box[None], "labels": (corner.sum() % CLASSES)[None]}
            for box, corner in zip(boxes, corners, strict=True)
        ]
        losses = self.model(list(images), targets)
        self.log_dict(losses, on_epoch=True, sync_dist=True)
        return sum(losses.values())  # type: ignore[return-value]


def transformer() -> Classifier:
    use_packages()
    import timm

    torch.manual_seed(0)
    shape = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return Classifier(timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **shape))


def residual() -> Classifier:
    use_packages()
    import timm

    torch.manual_seed(0)
    return Classifier(timm.create_model("resnet18", num_classes=CLASSES))


def detector() -> Detector:
    use_packages()
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    torch.manual_seed(0)
    pyramid = {"returned_layers": [2, 3, 4], "extra_blocks": LastLevelP6P7(256, 256), "trainable_layers": 5}
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, **pyramid)
    return Detector(RetinaNet(backbone, CLASSES, min_size=SIDE, max_size=SIDE))
