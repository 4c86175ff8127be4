"""Run by the interpreter that has torch and transformers; imports nothing of the rest of lpxbuild.

What transformers computes with a Hugging Face folder in float32: logits of whole texts, answers to prompts, and values
inside the model ("points") for one short text. It writes .npy files and result.json into the job's folder; what went
wrong is the last line on stderr.

That interpreter has no lpxbuild, so `lpxbuild.verify.sides` loads this folder as a package of its own. That is why the
modules here import each other relatively, and nothing else.
"""
