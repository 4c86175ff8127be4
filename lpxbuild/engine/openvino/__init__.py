"""The embedded engine: an OpenVINO graph made of the rank files, run by OpenVINO GenAI with paged attention."""
