/* driver.c -- a stand-in for libcuda: there is a context, and nothing else of what torch asks the driver itself for. */

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

#define SUCCEEDS(name)                                                                                                 \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return SUCCESS;                                                                                                \
    }
#define MISSING(name)                                                                                                  \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return NOT_SUPPORTED;                                                                                          \
    }

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuDevicePrimaryCtxRetain)
MISSING(cuDeviceGetAttribute)
MISSING(cuFuncGetAttribute)
MISSING(cuFuncSetAttribute)
MISSING(cuFuncSetCacheConfig)
MISSING(cuLaunchCooperativeKernel)
MISSING(cuLaunchKernel)
MISSING(cuLinkAddData_v2)
MISSING(cuLinkComplete)
MISSING(cuLinkCreate_v2)
MISSING(cuModuleGetFunction)
MISSING(cuModuleLoad)
MISSING(cuModuleLoadData)
MISSING(cuModuleLoadDataEx)
MISSING(cuModuleUnload)
MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
MISSING(cuPointerGetAttribute)
MISSING(cuTensorMapEncodeTiled)
