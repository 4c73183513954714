"""The networks that are measured: a small CNN, a ResNet-18 for 32 x 32 images, a 4-layer transformer."""

from __future__ import annotations

import numpy as np
from mindspore import nn, ops


class CNN(nn.Cell):
    """Two convolutions with BatchNorm, two dense layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2, 2)
        self.flat = nn.Flatten()
        self.fc1 = nn.Dense(2 * width * 8 * 8, 64)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Dense(64, 10)

    def construct(self, x):
        x = self.pool1(self.relu1(self.bn1(self.conv1(x))))
        x = self.pool2(self.relu2(self.bn2(self.conv2(x))))
        return self.fc2(self.relu3(self.fc1(self.flat(x))))


class BasicBlock(nn.Cell):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outside, outside, 3)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu2 = nn.ReLU()
        self.shortcut = nn.SequentialCell()
        self.same = stride == 1 and inside == outside
        if not self.same:
            self.shortcut = nn.SequentialCell(nn.Conv2d(inside, outside, 1, stride=stride), nn.BatchNorm2d(outside))

    def construct(self, x):
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if not self.same:
            x = self.shortcut(x)
        return self.relu2(x + y)


class ResNet18(nn.Cell):
    """11.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3)
        self.bn = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        blocks = []
        inside = 64
        for outside, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            blocks.append(BasicBlock(inside, outside, stride))
            inside = outside
        self.blocks = nn.SequentialCell(*blocks)
        self.fc = nn.Dense(512, 10)

    def construct(self, x):
        x = self.blocks(self.relu(self.bn(self.conv(x))))
        return self.fc(x.mean((2, 3)))


class Block(nn.Cell):
    """Attention and a feed-forward part, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.size = width // heads
        self.ln1 = nn.LayerNorm((width,))
        self.q = nn.Dense(width, width)
        self.k = nn.Dense(width, width)
        self.v = nn.Dense(width, width)
        self.softmax = nn.Softmax(-1)
        self.out = nn.Dense(width, width)
        self.ln2 = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Dense(4 * width, width)
        self.scale = float(1 / np.sqrt(self.size))

    def construct(self, x):
        batch, length, width = x.shape
        y = self.ln1(x)
        q = self.q(y).reshape(batch, length, self.heads, self.size).transpose(0, 2, 1, 3)
        k = self.k(y).reshape(batch, length, self.heads, self.size).transpose(0, 2, 3, 1)
        v = self.v(y).reshape(batch, length, self.heads, self.size).transpose(0, 2, 1, 3)
        weights = self.softmax(ops.matmul(q, k) * self.scale)
        y = ops.matmul(weights, v).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(self.gelu(self.up(self.ln2(x))))


class Transformer(nn.Cell):
    """Four layers of width 128 over 32 tokens."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, vocabulary: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.CellList([Block(width, heads) for _ in range(layers)])
        self.ln = nn.LayerNorm((width,))
        self.head = nn.Dense(width, 10)

    def construct(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x).mean(1))
