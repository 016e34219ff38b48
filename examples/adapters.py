"""LoRA, shared and of each device's own: pip install peft transformers; python examples/adapters.py shakespeare.npz"""

import torch
from next_character import role
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from edge_sdk.tasks import Task
from sparrow.simulation.simulate import simulate


class Tuned(nn.Module):
    """A GPT-2 with two adapters in each layer: `shared` is averaged, `own` stays on the device."""

    def __init__(self):
        super().__init__()
        # The same random base on each device stands in for GPT2LMHeadModel.from_pretrained(FOLDER).
        torch.manual_seed(0)
        base = GPT2LMHeadModel(GPT2Config(vocab_size=65, n_positions=32, n_embd=64, n_layer=2, n_head=4))
        lora = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
        self.net = get_peft_model(base, LoraConfig(r=4, **lora), adapter_name="shared")
        self.net.add_adapter("own", LoraConfig(r=2, **lora))
        self.net.base_model.set_adapter(["shared", "own"])

    def forward(self, x):
        """Return logits [N, characters, length] of characters [N, length]."""
        return self.net(input_ids=x).logits.transpose(1, 2)


def speaker(number: int) -> Task:
    """Return a role's speech for the model with adapters."""
    data = role(number)
    return Task(
        "tuned", Tuned(), nn.CrossEntropyLoss(), data.train, data.validation, classification=False, metrics=("top1",)
    )


if __name__ == "__main__":
    settings = {"method": "fedper", "method_settings": {"private": "*.own.*"}, "rounds": 3, "learning_rate": 0.01}
    settings |= {"optimizer": "adam"}
    print(simulate(app="sparrow.coordinator.main:app", federation="tuned", task=speaker, devices=4, **settings).ended)
