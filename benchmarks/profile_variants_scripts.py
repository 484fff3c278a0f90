"""Which scripts of others `profile_variants.py` compares, and how they are started."""

from __future__ import annotations

from dataclasses import dataclass

COMMITS = {
    "cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "leanrl": "8dbb6336b7f6cc65cdbbeb2e86637c38867e2677",
    "agents": "eb24cf5f93f99ed78261975cc61a7fc648febcd5",
}
ENVIRONMENTS = {
    "torch": "torch==2.14.1 stable-baselines3==2.9.2 rl_zoo3==2.9.2 gymnasium[mujoco]==1.4.0 tensordict torchrl flax optax "
             "tyro wandb tensorboard",
    "tf": "tensorflow-cpu==2.21.0 tf-keras==2.21.0 tensorflow-probability==0.25.0 tf-agents==0.19.0 (--no-deps) gin-config "
          "gym==0.23.1 tensorboard",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One script, as its authors wrote it: `path` is below the checkouts, or below the environment's packages.

    `lengths` are steps of the short and the long run, `{steps}` in the arguments; `{iterations}` is their number over
    `consecutive`, the simulator's steps between two calls of the learner. `packages` come before the environment's, `variables`
    are of the process. `parts` names the parts of the script's loop, by text where they begin. `own`: the clone's own packages
    are used, not installed ones.
    """

    study: str
    name: str
    backend: str
    model: str
    environment: str
    path: str
    arguments: tuple[str, ...]
    lengths: tuple[int, int]
    operations: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    consecutive: int = 1
    own: bool = False


VECTOR = ("simulation=gymnasium.vector.sync_vector_env:SyncVectorEnv.step",)
VECTOR_029 = ("simulation=gymnasium.vector.vector_env:VectorEnv.step",)
CLEAN = (("inference", "# ALGO LOGIC: put action logic here"), ("simulation", "# TRY NOT TO MODIFY: execute the game"),
         ("other", "# TRY NOT TO MODIFY: record rewards"), ("backpropagation", "# ALGO LOGIC: training."),
         ("", "envs.close()"))  # fmt: skip
NO_JIT = (("JAX_DISABLE_JIT", "1"),)
EAGER, GRAPH = "eager", "graph"


def cleanrl(
    study: str, name: str, kind: tuple[str, str], script: str, lengths: tuple[int, int], *arguments: str, **more
) -> Variant:
    """A script of CleanRL, or of LeanRL, which was made from it; `kind`: backend and model."""
    given = ("--total-timesteps", "{steps}", *arguments)
    path = f"{script.partition('/')[0]}/{script}"
    own = script.startswith("cleanrl")
    return Variant(study, name, *kind, "torch", path, given, lengths, parts=CLEAN, own=own, **more)


TORCH_EAGER, TORCH_GRAPH = ("torch", EAGER), ("torch", GRAPH)
JAX_EAGER, JAX_GRAPH = ("JAX", EAGER), ("JAX", GRAPH)
DQN = ("--learning-starts", "300", "--start-e", "0.05", "--end-e", "0.05")
CARTPOLE = {"operations": VECTOR_029, "packages": ("gymnasium-0.29.1",)}
TD3 = ("--env-id", "Hopper-v5", "--learning-starts", "300")
HOPPER = {"operations": VECTOR}
STUDY_DQN, STUDY_TD3 = "DQN, CartPole-v1", "TD3, Hopper-v5"
STUDY_DDPG = "DDPG, Pendulum-v1"

ZOO = "packages/rl_zoo3/train.py"


def sb3(study: str, name: str, lengths: tuple[int, int], *hyperparameters: str, consecutive: int = 1) -> Variant:
    algo = study.split(",")[0].lower()
    given = ("--algo", algo, "--env", study.split(", ")[1], "-n", "{steps}", "--eval-freq", "-1", "--log-folder", "{folder}",
             "--hyperparams", "learning_starts:300", *hyperparameters)  # fmt: skip
    named = ("simulation=stable_baselines3.common.vec_env.base_vec_env:VecEnv.step",
             "inference=stable_baselines3.common.off_policy_algorithm:OffPolicyAlgorithm._sample_action",
             "backpropagation=stable_baselines3.td3.td3:TD3.train")  # fmt: skip
    return Variant(study, name, "torch", EAGER, "torch", ZOO, given, lengths, named, consecutive=consecutive)


def tf_agents(study: str, name: str, model: str, lengths: tuple[int, int], consecutive: int = 1) -> Variant:
    algorithm = study.split(",")[0].lower()
    bindings = ("env_name='Pendulum-v1'", "env_load_fn=@suite_gym.load", "num_eval_episodes=1", "initial_collect_steps=300",
                f"use_tf_functions={model == GRAPH}", f"collect_steps_per_iteration={consecutive}",
                f"train_steps_per_iteration={consecutive}", "eval_interval=100000000")  # fmt: skip
    given = [x for b in bindings for x in ("--gin_param", f"train_eval.{b}")]
    parts = (("collection", "time_step, policy_state = collect_driver.run("),
             ("backpropagation", "for _ in range(train_steps_per_iteration)"), ("other", "time_acc += time.time()"),
             ("", "return train_loss"))  # fmt: skip
    return Variant(
        study, name, "TensorFlow", model, "tf", f"agents/tf_agents/agents/{algorithm}/examples/v2/train_eval.py",
        ("--root_dir", "{folder}", "--num_iterations", "{iterations}", *given), lengths,
        ("simulation=tf_agents.environments.gym_wrapper:GymWrapper._step",), parts, consecutive=consecutive,
    )  # fmt: skip


SIZES = "batch_size:64", "policy_kwargs:dict(net_arch=[400, 300])"
VARIANTS = (
    cleanrl(STUDY_DQN, "CleanRL dqn.py", TORCH_EAGER, "cleanrl/dqn.py", (1000, 21000), *DQN, **CARTPOLE),
    cleanrl(STUDY_DQN, "LeanRL dqn_torchcompile.py", TORCH_EAGER, "leanrl/dqn_torchcompile.py", (1000, 21000), *DQN, **CARTPOLE),
    cleanrl(STUDY_DQN, "LeanRL dqn_torchcompile.py --compile", TORCH_GRAPH, "leanrl/dqn_torchcompile.py", (1000, 21000),
            *DQN, "--compile", **CARTPOLE),
    cleanrl(STUDY_DQN, "CleanRL dqn_jax.py", JAX_GRAPH, "cleanrl/dqn_jax.py", (1000, 21000), *DQN, **CARTPOLE),
    cleanrl(STUDY_DQN, "CleanRL dqn_jax.py, JAX_DISABLE_JIT=1", JAX_EAGER, "cleanrl/dqn_jax.py", (400, 800), *DQN,
            variables=NO_JIT, **CARTPOLE),
    cleanrl(STUDY_TD3, "CleanRL td3_continuous_action.py", TORCH_EAGER, "cleanrl/td3_continuous_action.py", (400, 1400),
            *TD3, **HOPPER),
    cleanrl(STUDY_TD3, "CleanRL td3_continuous_action_jax.py", JAX_GRAPH, "cleanrl/td3_continuous_action_jax.py", (400, 1400),
            *TD3, **HOPPER),
    cleanrl(STUDY_TD3, "CleanRL td3_continuous_action_jax.py, JAX_DISABLE_JIT=1", JAX_EAGER,
            "cleanrl/td3_continuous_action_jax.py", (310, 350), *TD3, variables=NO_JIT, **HOPPER),
    *(tf_agents(STUDY_DDPG, f"TF-Agents train_eval.py, use_tf_functions, {n} consecutive", GRAPH, lengths, n)
      for n, lengths in ((1, (300, 2300)), (10, (300, 4300)), (100, (300, 6300)), (1000, (1000, 9000)))),
    *(tf_agents(STUDY_DDPG, f"TF-Agents train_eval.py, {n} consecutive", EAGER, (100, 300), n) for n in (1, 100)),
    *(sb3(STUDY_DDPG, f"SB3 DDPG, {n} consecutive", lengths, *SIZES, f"train_freq:{n}", f"gradient_steps:{n}", consecutive=n)
      for n, lengths in ((1, (500, 2500)), (100, (500, 2500)), (1000, (2000, 4000)))),
)  # fmt: skip
