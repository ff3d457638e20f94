"""scikit-learn's handwritten digits, a training loop and a metric: what the examples on them share."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import qsim

Loader = DataLoader[tuple[Tensor, ...]]


def loaders() -> tuple[Loader, Loader]:
    """1347 images (1, 8, 8) in [0, 1] with labels to train on, shuffled the same way in every run; 450 to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    parts = train_test_split(images, torch.tensor(digits.target), test_size=450, random_state=0, stratify=digits.target)
    train, test = TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])
    return DataLoader(train, 64, shuffle=True, generator=torch.Generator().manual_seed(0)), DataLoader(test, 450)


def train(model: nn.Module, loader: Loader, epochs: int, optimizer: torch.optim.Optimizer, title: str) -> None:
    """An ordinary loop: cross-entropy, gradients clipped, the learning rate falling as a cosine."""
    model.train()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in tqdm(range(epochs), desc=title, unit="epoch", leave=False, disable=None):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            qsim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: Loader) -> float:
    """Share of right answers, in percent."""
    model.eval()
    hits = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return 100 * torch.cat(hits).mean().item()
