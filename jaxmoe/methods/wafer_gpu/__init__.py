"""wafer_gpu: tasks allocated by where data is, and copies of remote experts in local memory."""
