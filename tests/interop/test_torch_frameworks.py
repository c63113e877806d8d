"""offload() in the programs of other libraries, at tiny size: the same bits as without it.

Hugging Face's transformers, Trainer, peft and accelerate, diffusers' pipelines, and Lightning.
"""

import copy

import pytest

from constants import EMULATED
from offloaded import assert_same_module
from tensors import mt, torch

transformers = pytest.importorskip("transformers")
# Warnings of these libraries are ignored; a warning of offload() fails a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:(lightning|diffusers|torch.utils.data)"),
]

BUDGET = 96 << 10  # the model has 366 KiB
TOKENS = 100
CPU = EMULATED  # where torch has no kernels for the device


def same(one, other):
    """The same bits; on GPUs, kernels of attention and embeddings add in any order."""
    return torch.equal(one, other) if EMULATED else torch.allclose(one, other, atol=1e-3)


def assert_alike(model, reference):
    if EMULATED:
        assert_same_module(model, reference)
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert same(one.detach().cpu(), other.detach().cpu()), name


def llama_config(**options):
    return transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config()).eval()


def rows(count=8, length=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, TOKENS, (count, length), generator=generator)


def examples():
    return [{"input_ids": row, "labels": row} for row in rows()]


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def test_generate(on):
    model = llama().to(on)
    with mt.offload(model, 0, budget=BUDGET) as handle:
        reference = llama().to(handle.device)
        for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
            given = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
            prompt = rows(2).to(handle.device)
            assert same(model.generate(prompt, **given), reference.generate(prompt, **given))
        assert handle.stats()["streamed"] > 0


def test_weights_from_files(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    config = llama_config(tie_word_embeddings=True)
    original = transformers.LlamaForCausalLM(config).eval()
    original.save_pretrained(tmp_path)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(RuntimeError, match=r"lacks 'lm_head.weight'. If it is tied, call model.ti"):
        mt.load_model(model, tmp_path)
    model.tie_weights()
    assert mt.load_model(model, tmp_path) == ([], [])
    with mt.offload(model, 0, budget=BUDGET, read_only=True) as handle, torch.no_grad():
        prompt = rows(2).to(handle.device)
        assert same(model(prompt).logits, original.to(handle.device)(prompt).logits)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")

    def trained(model, optimizer):
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            use_cpu=CPU,
            report_to=[],
            save_steps=2,
            disable_tqdm=True,
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # of several it makes a DataParallel
        trainer = transformers.Trainer(
            model, arguments, train_dataset=examples(), optimizers=(optimizer, None)
        )
        trainer.train()
        return trainer.state.log_history[-1]["train_loss"]

    model, reference = llama(), llama()
    optimizer = adamw(model)
    with mt.offload(model, 0, budget=BUDGET, optimizer=optimizer) as handle:
        loss = trained(model, optimizer)
        assert handle.stats()["streamed"] > 0
        reference = reference.to(handle.device)
        assert loss == pytest.approx(trained(reference, adamw(reference)), rel=1e-4)
        assert_alike(model, reference)
        # What it saved is what is there.
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
        assert_alike(saved, copy.deepcopy(reference).cpu())


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")

    def train(model, optimizer):
        accelerator = accelerate.Accelerator(cpu=CPU)
        loader = torch.utils.data.DataLoader(rows(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    model, reference = llama(), llama()
    optimizer = adamw(model)
    with mt.offload(model, 0, budget=BUDGET, optimizer=optimizer) as handle:
        train(model, optimizer)
        reference = reference.to(handle.device)
        train(reference, adamw(reference))
        assert_alike(model, reference)


def test_peft():
    peft = pytest.importorskip("peft")

    def with_adapters():
        torch.manual_seed(2)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0
        )
        return peft.get_peft_model(llama(), config)

    def train(model, optimizer, device):
        for row in rows().to(device).split(2):
            model(input_ids=row, labels=row).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, reference = with_adapters(), with_adapters()
    optimizer = adamw(model)
    with mt.offload(model, 0, budget=BUDGET, optimizer=optimizer) as handle:
        train(model, optimizer, handle.device)
        reference = reference.to(handle.device)
        train(reference, adamw(reference), handle.device)
        assert_alike(model, reference)
        # Parts with adapters are copied home after steps: the weights below never are.
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        assert handle.stats()["bytes_home"] < 4 * (trained + (64 << 10))
        with model.disable_adapter(), reference.disable_adapter(), torch.no_grad():
            prompt = rows(2).to(handle.device)
            assert same(model(prompt).logits, reference(prompt).logits)
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    assert_alike(merged, expected.cpu())


def test_adapters_that_come_and_go_while_a_model_is_offloaded(on):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = llama().to(on)
    with mt.offload(model, 0, budget=BUDGET) as handle, torch.no_grad():
        reference = llama().to(handle.device)
        prompt = rows(2).to(handle.device)
        adapted = []
        for each in (model, reference):
            torch.manual_seed(2)
            adapted.append(peft.get_peft_model(each, config).eval())
        handle.refresh()
        names = [name for name, _ in model.named_parameters() if "lora" in name]
        assert len(names) == 24
        for each in (adapted, [one.merge_and_unload() for one in adapted]):
            handle.refresh()
            for _ in range(2):
                assert same(each[0](prompt).logits, each[1](prompt).logits)
    assert_alike(model, reference)


def test_diffusers(on):
    diffusers = pytest.importorskip("diffusers")

    def pipeline():
        torch.manual_seed(0)
        transformer = diffusers.DiTTransformer2DModel(
            sample_size=8,
            num_layers=4,
            patch_size=4,
            attention_head_dim=8,
            num_attention_heads=3,
            in_channels=4,
            out_channels=8,
            num_embeds_ada_norm=1000,
            norm_elementwise_affine=False,
        )
        vae = diffusers.AutoencoderKL(
            block_out_channels=(32, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        )
        made = diffusers.DiTPipeline(transformer.eval(), vae.eval(), diffusers.DDIMScheduler())
        made.set_progress_bar_config(disable=True)
        return made

    def images(pipe, device):
        return pipe(
            class_labels=[1, 7],
            generator=torch.Generator(device).manual_seed(0),
            num_inference_steps=3,
            output_type="np",
        ).images

    pipe = pipeline().to(on)
    with mt.offload(pipe, 0, budget="256 KiB") as handle:
        with handle.round():
            made = images(pipe, handle.device)
        names = {part.name.split(".")[0] for part in handle.explain()}
        assert names >= {"transformer", "vae"}
        assert handle.stats()["streamed"] > 0
        expected = images(pipeline().to(handle.device), handle.device)
        assert same(torch.from_numpy(made), torch.from_numpy(expected))


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()
            self.optimizer = adamw(self.model)

        def training_step(self, batch, index):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return self.optimizer

    def fit(task):
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu" if CPU else "gpu",
            devices=1,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(task, torch.utils.data.DataLoader(rows(), batch_size=2))

    task, reference = Task(), Task()
    with mt.offload(task.model, 0, budget=BUDGET, optimizer=task.optimizer) as handle:
        fit(task)
        assert handle.stats()["streamed"] > 0
    fit(reference)
    assert_alike(task.model, reference.model.cpu())
