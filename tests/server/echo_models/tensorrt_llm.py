"""Stand-in: repeats the ids of the prompt, one each `token_delay` seconds, for one request after the other.

One at a time, so that many requests queue up behind each other as they do in an engine that is full.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def _value(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().ravel()[0]


def _response(tokens):
    ids = np.array(tokens, np.int32).reshape(1, 1, -1)
    lengths = np.array([[ids.shape[-1]]], np.int32)
    tensors = [pb_utils.Tensor("output_ids", ids), pb_utils.Tensor("sequence_length", lengths)]
    return pb_utils.InferenceResponse(tensors)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.delay = float(config["parameters"]["token_delay"]["string_value"])
        self.turn = threading.Lock()

    def execute(self, requests):
        if self.decoupled:
            for request in requests:
                threading.Thread(
                    target=self._stream, args=(request, request.get_response_sender()), daemon=True
                ).start()
            return None
        return [_response(list(self._tokens(request))) for request in requests]

    def _tokens(self, request):
        length = max(int(_value(request, "input_lengths", 0)), 1)
        prompt = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1)
        for index in range(int(_value(request, "request_output_len", 0))):
            time.sleep(self.delay)
            yield int(prompt[index % length])

    def _stream(self, request, sender):
        with self.turn:
            made = []
            for token in self._tokens(request):
                if sender.is_cancelled():
                    break
                made.append(token)
                if _value(request, "streaming", False):
                    sender.send(_response([token]))
            if not _value(request, "streaming", False):
                sender.send(_response(made))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
