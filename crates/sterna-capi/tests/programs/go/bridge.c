#include <sys/mman.h>

#include "bridge.h"
#include "_cgo_export.h"

static bool is_running(void *user) {
    return goIsRunning((uintptr_t)user);
}

static int32_t stop(void *user, sterna_failure *failure) {
    (void)failure;
    goRun((uintptr_t)user, false);
    return 0;
}

static int32_t resume(void *user, sterna_failure *failure) {
    (void)failure;
    goRun((uintptr_t)user, true);
    return 0;
}

static int32_t save(void *user, sterna_state *state, sterna_failure *failure) {
    uint32_t number = goSave((uintptr_t)user);
    (void)failure;
    sterna_state_write(state, &number, sizeof number);
    return 0;
}

static int32_t load(void *user, uint32_t version, const uint8_t *body, size_t length, sterna_failure *failure) {
    (void)version;
    return goLoad((uintptr_t)user, (void *)body, length, failure);
}

static int32_t nothing_written(void *user, sterna_dirty_pages *found, sterna_failure *failure) {
    (void)user, (void)found, (void)failure;
    return 0;
}

void *bridge_memory(uint64_t length) {
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

sterna_vm *bridge_vm(uintptr_t handle, void *memory, uint64_t length, sterna_error **error) {
    void *user = (void *)handle;
    sterna_vm *vm;
    sterna_vm_callbacks callbacks = {
        .size = sizeof callbacks,
        .user = user,
        .is_running = is_running,
        .stop = stop,
        .resume = resume,
        .start = resume,
    };
    sterna_ram_block block = {.size = sizeof block, .name = "ram", .address = memory, .length = length, .fd = -1};
    sterna_device device = {.size = sizeof device, .user = user, .name = "number", .save = save, .load = load};
    sterna_dirty_log log = {.size = sizeof log, .read = nothing_written};
    if (sterna_vm_new("go-1", NULL, &callbacks, &vm, error))
        return NULL;
    if (sterna_vm_add_ram(vm, &block, error) || sterna_vm_add_device(vm, &device, error) ||
        sterna_vm_use_dirty_log(vm, &log, error)) {
        sterna_vm_free(vm);
        return NULL;
    }
    return vm;
}
