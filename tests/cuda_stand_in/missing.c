/* missing.c -- what torch links to and no test of ours needs: functions that do nothing, or fail and say so. */
#include <stdio.h>

#define NOTHING(name)                                                                                                  \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }
#define MISSING(name)                                                                                                  \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        fprintf(stderr, "stand-in for CUDA: there is no %s\n", #name);                                                 \
        return ERROR;                                                                                                  \
    }

#ifdef OF_NCCL
#define ERROR 5 /* ncclInvalidUsage */
NOTHING(ncclCommFinalize)
NOTHING(ncclCommDestroy)
NOTHING(ncclCommDeregister)
NOTHING(ncclCommWindowDeregister)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
NOTHING(ncclRedOpDestroy)
#elif defined(OF_DRIVER)
#define ERROR 801 /* CUDA_ERROR_NOT_SUPPORTED */
NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuDevicePrimaryCtxRetain)
#else
#define ERROR 801 /* cudaErrorNotSupported */
NOTHING(__cudaInitModule)
NOTHING(__cudaRegisterFatBinary)
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaRegisterVar)
NOTHING(__cudaUnregisterFatBinary)
NOTHING(cudaDeviceEnablePeerAccess)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
NOTHING(cudaStreamDestroy)
#endif
FOR_EACH_MISSING(MISSING) /* on the command line: what this torch needs, and no other file has */
