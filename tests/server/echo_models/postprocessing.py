"""Stand-in: one byte of text per token id."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            texts = [
                bytes((tokens[row, beam, : lengths[row, beam]] & 0xFF).astype(np.uint8))
                for row in range(tokens.shape[0])
                for beam in range(tokens.shape[1])
            ]
            output = np.array(texts, dtype=object).reshape(tokens.shape[:2])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        return responses
