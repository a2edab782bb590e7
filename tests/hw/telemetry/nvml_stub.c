/* What a test puts in the place of libnvidia-ml.so.1, for the real binding to load: up to four GPUs
 * that draw what they are told to, for as long as they are told that time passes. The types and
 * codes are those of nvml.h. The functions that begin with stub_ are the test's. */
#include <stdio.h>
#include <string.h>

typedef int Answer; /* nvmlReturn_t */
enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6 };

typedef struct {
    unsigned milliwatt;
    unsigned long long millijoule;
    unsigned bits; /* of its counter */
} Gpu;

typedef union {
    double d;
    unsigned ui;
    unsigned long ul;
    unsigned long long ull;
} Value;

typedef struct { /* nvmlFieldValue_t */
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type; /* 1: unsigned int */
    Answer answer;
    Value value;
} Field;

enum { GPUS = 4, NAMES = 16 };
static Gpu gpus[GPUS];
static unsigned count = 1;
static int begun;
static struct { char name[48]; Answer answer; } failing[NAMES];

static Answer failure(const char *name) {
    for (int i = 0; i < NAMES; i++)
        if (!strcmp(failing[i].name, name)) return failing[i].answer;
    return SUCCESS;
}

#define ENTER()                                                 \
    do {                                                        \
        Answer refused = failure(__func__);                     \
        if (refused) return refused;                            \
        if (!begun) return UNINITIALIZED;                       \
    } while (0)

void stub_reset(unsigned number) {
    memset(failing, 0, sizeof failing);
    count = number;
    begun = 0;
    for (int i = 0; i < GPUS; i++) gpus[i] = (Gpu){20000, 1000000, 64};
}

void stub_fail(const char *name, Answer answer) {
    for (int i = 0; i < NAMES; i++)
        if (!failing[i].name[0] || !strcmp(failing[i].name, name)) {
            snprintf(failing[i].name, sizeof failing[i].name, "%s", name);
            failing[i].answer = answer;
            return;
        }
}

void stub_power(unsigned gpu, unsigned milliwatt) { gpus[gpu].milliwatt = milliwatt; }

void stub_counter(unsigned gpu, unsigned long long millijoule, unsigned bits) {
    gpus[gpu].millijoule = millijoule;
    gpus[gpu].bits = bits;
}

void stub_pass(unsigned milliseconds) {
    for (int i = 0; i < GPUS; i++) {
        gpus[i].millijoule += (unsigned long long)gpus[i].milliwatt * milliseconds / 1000;
        if (gpus[i].bits < 64) gpus[i].millijoule &= (1ULL << gpus[i].bits) - 1;
    }
}

int stub_begun(void) { return begun; }

Answer nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    Answer refused = failure(__func__);
    if (!refused) begun++;
    return refused;
}

Answer nvmlShutdown(void) {
    if (!begun) return UNINITIALIZED;
    begun--;
    return SUCCESS;
}

Answer nvmlDeviceGetCount_v2(unsigned *number) {
    ENTER();
    *number = count;
    return SUCCESS;
}

Answer nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    ENTER();
    if (index >= count) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return SUCCESS;
}

Answer nvmlDeviceGetUUID(Gpu *gpu, char *buffer, unsigned size) {
    ENTER();
    snprintf(buffer, size, "GPU-00000000-0000-0000-0000-%012d", (int)(gpu - gpus));
    return SUCCESS;
}

Answer nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    ENTER();
    for (unsigned i = 0; i < count; i++) {
        char own[64];
        nvmlDeviceGetUUID(&gpus[i], own, sizeof own);
        if (!strcmp(own, uuid)) {
            *gpu = &gpus[i];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

Answer nvmlDeviceGetName(Gpu *gpu, char *buffer, unsigned size) {
    ENTER();
    snprintf(buffer, size, "Stub %d", (int)(gpu - gpus));
    return SUCCESS;
}

Answer nvmlDeviceGetTotalEnergyConsumption(Gpu *gpu, unsigned long long *millijoule) {
    ENTER();
    *millijoule = gpu->millijoule;
    return SUCCESS;
}

Answer nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatt) {
    ENTER();
    *milliwatt = gpu->milliwatt;
    return SUCCESS;
}

/* Answers for the call, then for each field: "field" fails the second. */
Answer nvmlDeviceGetFieldValues(Gpu *gpu, int number, Field *fields) {
    ENTER();
    for (int i = 0; i < number; i++) {
        fields[i].type = 1;
        fields[i].answer = fields[i].field == 186 ? failure("field") : NOT_SUPPORTED;
        fields[i].value.ull = 0;
        fields[i].value.ui = gpu->milliwatt;
    }
    return SUCCESS;
}

const char *nvmlErrorString(Answer answer) {
    switch (answer) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}
