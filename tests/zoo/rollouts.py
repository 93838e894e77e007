"""A loop of reinforcement learning: actor and critic with an optimizer each, several passes over each rollout."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACTIONS = 3


def loader() -> DataLoader[Any]:
    starts = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(starts), batch_size=4)


class ActorCritic(pl.LightningModule):
    """Proximal policy optimization in an environment that is a function of state and action."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, ACTIONS))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    @torch.no_grad()
    def play(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states, actions, rewards = [], [], []
        for time in range(5):
            chance = torch.softmax(self.actor(state), 1).cumsum(1)
            drawn = torch.sin(1000 * state.sum(1, keepdim=True) + time).abs()  # by the state: the same under ddp
            action = (drawn > chance).sum(1).clamp(max=ACTIONS - 1)
            states.append(state)
            actions.append(action)
            state = torch.tanh(state + 0.3 * (action[:, None] - 1))
            rewards.append(-state.square().mean(1))
        return torch.stack(states), torch.stack(actions), torch.stack(rewards)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        actor, critic = self.optimizers()
        states, actions, rewards = self.play(batch[0])
        returns = rewards.flip(0).cumsum(0).flip(0)
        with torch.no_grad():
            before = torch.log_softmax(self.actor(states), -1).gather(-1, actions[..., None])
            advantage = returns[..., None] - self.critic(states)
        for _ in range(3):
            now = torch.log_softmax(self.actor(states), -1).gather(-1, actions[..., None])
            ratio = (now - before).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            actor.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(actor, gradient_clip_val=0.5)
            actor.step()
            missed = (self.critic(states) - returns[..., None]).square().mean()
            critic.zero_grad()
            self.manual_backward(missed)
            critic.step()
        self.log("reward", rewards.mean(), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        actor = torch.optim.Adam(self.actor.parameters(), lr=3e-3, eps=1e-4)
        critic = torch.optim.Adam(self.critic.parameters(), lr=1e-2, eps=1e-4)
        return [actor, critic]
