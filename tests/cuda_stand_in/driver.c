/* driver.c -- a stand-in for libcuda: there is a context; of what else torch asks the driver itself for, see missing.c. */

enum { SUCCESS = 0, NOT_SUPPORTED = 801 };

static int context;

int
cuCtxGetCurrent(void **current)
{
    *current = &context;
    return SUCCESS;
}

int
cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return SUCCESS;
}

int
cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return SUCCESS;
}

int
cuGetErrorString(int error, const char **text)
{
    *text = error == SUCCESS ? "no error" : "not supported by the stand-in for CUDA's driver";
    return SUCCESS;
}
