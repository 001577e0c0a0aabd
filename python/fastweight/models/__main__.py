"""Another program with these classes registered: python -m fastweight.models MODULE [ARGUMENTS...]

    python -m fastweight.models lm_eval --model hf --model_args pretrained=run/model,tokenizer=run/model --tasks lambada_openai
"""

import runpy
import sys

import fastweight.models  # noqa: F401

if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
    print(__doc__.strip(), file=sys.stderr)
    sys.exit(2 if len(sys.argv) < 2 else 0)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
