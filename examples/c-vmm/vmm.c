/*
 * A small KVM machine in C that Sterna migrates: one vCPU, 1 MiB of RAM, a console, a lock. docs/c-api.md describes the interface.
 *
 * In this order: the guest, the vCPU, the callbacks of the library, the operator's commands.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sterna.h"

/*
 * Increments every word of 64 KiB, sweep after sweep, and prints each count. Halts at a word with an older count, so a page
 * that is lost or old ends the guest.
 */
static const uint8_t GUEST[] = {
    0x66, 0x40,                                     /* sweep:  inc eax                                              */
    0x66, 0xff, 0x05, 0x66, 0x39, 0x05, 0x75, 0x0a, /* word:   inc dword ptr [di]; cmp [di], eax; jne broken        */
    0x83, 0xc7, 0x04, 0x75, 0xf3,                   /*         add di, 4; jnz word                                  */
    0x66, 0xe7, 0x10, 0xeb, 0xec,                   /*         out 0x10, eax; jmp sweep                             */
    0xf4, 0xeb, 0xfd,                               /* broken: hlt; jmp broken                                      */
};
#define CODE 0x1000
#define RAM_BYTES (1u << 20)

struct machine {
    const char *name;
    int vm, vcpu, lock, ram_fd;
    struct kvm_run *run;
    uint8_t *ram;
    pthread_t thread;
    bool runs;              /* protected by `mutex`: whether `thread` exists */
    pthread_mutex_t mutex;
    atomic_bool may_run;
    atomic_uint printed;    /* how many numbers the guest has printed in this process */
};

static void die(const char *what) {
    perror(what);
    exit(1);
}

/* Ends the program with the library's error. */
static void refuse(const char *what, sterna_error *error) {
    fprintf(stderr, "%s: %s\n", what, sterna_error_message(error));
    sterna_error_free(error);
    exit(1);
}

/* ---- The vCPU ---- */

static void interrupt(int signal) {
    (void)signal; /* It only interrupts KVM_RUN. */
}

static void *run_vcpu(void *user) {
    struct machine *machine = user;
    for (;;) {
        /*
         * KVM completes an instruction that caused an exit only at the next KVM_RUN. Before it stops, the loop therefore
         * enters KVM once more with `immediate_exit`, which returns after the completion.
         */
        bool last = !atomic_load(&machine->may_run);
        machine->run->immediate_exit = last;
        if (ioctl(machine->vcpu, KVM_RUN, 0) < 0) {
            if (errno != EINTR)
                die("KVM_RUN");
            if (last)
                return NULL;
            continue;
        }
        if (machine->run->exit_reason == KVM_EXIT_IO && machine->run->io.port == 0x10) {
            uint32_t number;
            memcpy(&number, (uint8_t *)machine->run + machine->run->io.data_offset, sizeof number);
            printf("%s: the guest printed %u\n", machine->name, number);
            atomic_fetch_add(&machine->printed, 1);
        } else {
            fprintf(stderr, "%s: the guest ended: exit %u\n", machine->name, machine->run->exit_reason);
            exit(1);
        }
    }
}

/* The state that this guest changes. A guest with floating point, interrupts or MSRs needs more. */
struct cpu_state {
    struct kvm_regs regs;
    struct kvm_sregs sregs;
};

static int save_cpu(void *user, sterna_state *state, sterna_failure *failure) {
    struct machine *machine = user;
    struct cpu_state cpu;
    memset(&cpu, 0, sizeof cpu);
    if (ioctl(machine->vcpu, KVM_GET_REGS, &cpu.regs) < 0 || ioctl(machine->vcpu, KVM_GET_SREGS, &cpu.sregs) < 0) {
        sterna_failure_set(failure, strerror(errno));
        return -1;
    }
    sterna_state_write(state, &cpu, sizeof cpu);
    return 0;
}

/* The peer has sent the body. KVM checks its meaning, and a wrong value can harm only the guest. */
static int load_cpu(void *user, uint32_t version, const uint8_t *body, size_t length, sterna_failure *failure) {
    struct machine *machine = user;
    struct cpu_state cpu;
    (void)version;
    if (length != sizeof cpu) {
        sterna_failure_set(failure, "the section has another length than the state of a vCPU");
        return -1;
    }
    memcpy(&cpu, body, sizeof cpu);
    if (ioctl(machine->vcpu, KVM_SET_SREGS, &cpu.sregs) < 0 || ioctl(machine->vcpu, KVM_SET_REGS, &cpu.regs) < 0) {
        sterna_failure_set(failure, strerror(errno));
        return -1;
    }
    return 0;
}

/* ---- The callbacks of the machine ---- */

static bool is_running(void *user) {
    struct machine *machine = user;
    return atomic_load(&machine->may_run);
}

static int stop(void *user, sterna_failure *failure) {
    struct machine *machine = user;
    (void)failure;
    pthread_mutex_lock(&machine->mutex);
    if (machine->runs) {
        atomic_store(&machine->may_run, false);
        /* Repeated, because a signal that arrives between the check of `may_run` and KVM_RUN is lost. */
        while (pthread_tryjoin_np(machine->thread, NULL) == EBUSY) {
            pthread_kill(machine->thread, SIGRTMIN);
            usleep(100);
        }
        machine->runs = false;
    }
    pthread_mutex_unlock(&machine->mutex);
    return 0;
}

static int resume(void *user, sterna_failure *failure) {
    struct machine *machine = user;
    int error = 0;
    pthread_mutex_lock(&machine->mutex);
    if (!machine->runs) {
        atomic_store(&machine->may_run, true);
        error = pthread_create(&machine->thread, NULL, run_vcpu, machine);
        machine->runs = error == 0;
        atomic_store(&machine->may_run, machine->runs);
    }
    pthread_mutex_unlock(&machine->mutex);
    if (error)
        sterna_failure_set(failure, strerror(error));
    return error;
}

/* The end of the library's use: no thread of it touches the memory from now on. */
static void destroy(void *user) {
    struct machine *machine = user;
    stop(machine, NULL);
    munmap(machine->ram, RAM_BYTES);
    close(machine->ram_fd);
    close(machine->vcpu);
    close(machine->vm);
    close(machine->lock);
    free(machine);
}

/* A lock on a file keeps two guests from using one disk. It changes hands while neither side runs the guest. */
static int take_lock(void *user, sterna_failure *failure) {
    struct machine *machine = user;
    if (flock(machine->lock, LOCK_EX | LOCK_NB) == 0)
        return 0;
    sterna_failure_set(failure, "the lock is taken: end the other c-vmm first");
    return -1;
}

static int release_lock(void *user, sterna_failure *failure) {
    struct machine *machine = user;
    (void)failure;
    return flock(machine->lock, LOCK_UN);
}

static void give_lock_back(void *user) {
    release_lock(user, NULL);
}

static void tell(void *user, const sterna_event *event) {
    printf("%s: %s\n", (const char *)user, event->text);
}

/* ---- Building the machine ---- */

static struct machine *new_machine(const char *name) {
    struct machine *machine = calloc(1, sizeof *machine);
    machine->name = name;
    pthread_mutex_init(&machine->mutex, NULL);
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (kvm < 0)
        die("/dev/kvm");
    machine->vm = ioctl(kvm, KVM_CREATE_VM, 0);
    /* Real mode on Intel needs three pages that are not RAM. */
    if (machine->vm < 0 || ioctl(machine->vm, KVM_SET_TSS_ADDR, 0xfffbd000ul) < 0)
        die("KVM_CREATE_VM");
    machine->ram_fd = memfd_create("ram", MFD_CLOEXEC);
    if (machine->ram_fd < 0 || ftruncate(machine->ram_fd, RAM_BYTES) < 0)
        die("memfd_create");
    machine->ram = mmap(NULL, RAM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, machine->ram_fd, 0);
    if (machine->ram == MAP_FAILED)
        die("mmap");
    struct kvm_userspace_memory_region region = {.memory_size = RAM_BYTES, .userspace_addr = (uintptr_t)machine->ram};
    if (ioctl(machine->vm, KVM_SET_USER_MEMORY_REGION, &region) < 0)
        die("KVM_SET_USER_MEMORY_REGION");
    machine->vcpu = ioctl(machine->vm, KVM_CREATE_VCPU, 0);
    int run_bytes = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    machine->run = mmap(NULL, run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, machine->vcpu, 0);
    if (machine->run == MAP_FAILED)
        die("KVM_CREATE_VCPU");
    close(kvm);

    /* Real mode at the guest's first instruction. The 64 KiB that the guest counts are the DS segment. */
    struct kvm_sregs sregs;
    struct kvm_regs regs = {.rip = CODE, .rflags = 2};
    if (ioctl(machine->vcpu, KVM_GET_SREGS, &sregs) < 0)
        die("KVM_GET_SREGS");
    sregs.cs.base = 0, sregs.cs.selector = 0;
    sregs.ds.base = 0x10000, sregs.ds.selector = 0x1000;
    if (ioctl(machine->vcpu, KVM_SET_SREGS, &sregs) < 0 || ioctl(machine->vcpu, KVM_SET_REGS, &regs) < 0)
        die("KVM_SET_SREGS");

    char path[4096];
    const char *directory = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/c-vmm.lock", directory ? directory : "/tmp");
    machine->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (machine->lock < 0)
        die(path);
    /* A signal interrupts KVM_RUN. Without a handler it would end the process. */
    struct sigaction action = {.sa_handler = interrupt};
    sigaction(SIGRTMIN, &action, NULL);
    return machine;
}

/* Describes the machine to the library. */
static sterna_vm *describe(struct machine *machine) {
    sterna_error *error;
    sterna_vm *vm;
    sterna_vm_callbacks callbacks = {
        .size = sizeof callbacks,
        .user = machine,
        .destroy = destroy,
        .is_running = is_running,
        .stop = stop,
        .resume = resume,
        .start = resume,
    };
    sterna_ram_block block = {
        .size = sizeof block,
        .name = "ram",
        .address = machine->ram,
        .length = RAM_BYTES,
        .fd = machine->ram_fd,
        .flags = STERNA_RAM_SHARED | STERNA_RAM_AT_GUEST_ADDRESS | STERNA_RAM_MAY_DISCARD | STERNA_RAM_MAY_USERFAULTFD,
    };
    sterna_device cpu = {.size = sizeof cpu, .user = machine, .name = "cpu", .save = save_cpu, .load = load_cpu};
    sterna_hook lock = {
        .size = sizeof lock,
        .user = machine,
        .name = "lock",
        .release = release_lock,
        .take_back = take_lock,
        .acquire = take_lock,
        .give_back = give_lock_back,
    };
    sterna_kvm_slot slot = {.slot = 0, .pages = RAM_BYTES / 4096};
    if (sterna_vm_new("c-vmm-1", NULL, &callbacks, &vm, &error) ||
        sterna_vm_add_ram(vm, &block, &error) ||
        sterna_vm_add_device(vm, &cpu, &error) ||
        sterna_vm_add_hook(vm, &lock, &error) ||
        sterna_vm_use_kvm_dirty_log(vm, machine->vm, &slot, 1, &error))
        refuse(machine->name, error);
    return vm;
}

/* ---- The operator's commands ---- */

/* Waits until the guest has printed `more` numbers. */
static void watch(struct machine *machine, unsigned more) {
    unsigned before = atomic_load(&machine->printed);
    while (atomic_load(&machine->printed) - before < more)
        usleep(10000);
}

/* Reads "NAME=VALUE" (a parameter), "+NAME" (a capability) and "tls=DIRECTORY". */
static sterna_parameters *settings(char **arguments) {
    sterna_error *error;
    sterna_parameters *parameters;
    if (sterna_parameters_new(&parameters, &error))
        refuse("settings", error);
    for (; *arguments; arguments++) {
        char *value = strchr(*arguments, '=');
        int code;
        if (**arguments == '+') {
            code = sterna_parameters_set_capability(parameters, *arguments + 1, true, &error);
        } else if (!strncmp(*arguments, "tls=", 4)) {
            code = sterna_parameters_set_tls_directory(parameters, value + 1, &error);
        } else {
            if (value)
                *value++ = 0;
            code = sterna_parameters_set(parameters, *arguments, value, &error);
        }
        if (code)
            refuse(*arguments, error);
    }
    return parameters;
}

/* Boots a guest and, with an address, sends it away when it has printed 20 numbers. */
static int run(const char *address, char **arguments) {
    sterna_error *error;
    sterna_migration *migration;
    struct machine *machine = new_machine("source");
    sterna_parameters *parameters = settings(arguments);
    sterna_vm *vm = describe(machine);
    sterna_observer observer = {.size = sizeof observer, .user = "source", .event = tell};
    memcpy(machine->ram + CODE, GUEST, sizeof GUEST);
    if (take_lock(machine, NULL) || resume(machine, NULL))
        die("the guest cannot start");
    watch(machine, address ? 20 : ~0u);
    if (sterna_migration_start(vm, address, parameters, &observer, &migration, &error))
        refuse("source", error);
    /* Until the commit nothing is lost: after a failure the guest continues here, and another migration may begin. */
    if (sterna_migration_wait(migration, -1, &error))
        refuse("source", error);
    char *statistics = sterna_migration_statistics(migration);
    printf("statistics: %s\n", statistics);
    sterna_string_free(statistics);
    sterna_migration_free(migration);
    sterna_parameters_free(parameters);
    sterna_vm_free(vm);
    return 0;
}

/* Waits for a guest and runs it. The handle is kept: a source that lost the acknowledgement asks it for the guest's fate. */
static int receive(const char *address, char **arguments) {
    sterna_error *error;
    sterna_incoming *incoming;
    struct machine *machine = new_machine("target");
    sterna_parameters *parameters = settings(arguments);
    sterna_vm *vm = describe(machine);
    sterna_observer observer = {.size = sizeof observer, .user = "target", .event = tell};
    if (sterna_incoming_listen(vm, address, parameters, &observer, &incoming, &error))
        refuse("target", error);
    char *bound = sterna_incoming_address(incoming);
    printf("target: listening at %s\n", bound);
    sterna_string_free(bound);
    if (sterna_incoming_wait(incoming, -1, NULL, &error))
        refuse("target", error);
    watch(machine, ~0u);
    return 0;
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count >= 3 && !strcmp(arguments[1], "run"))
        return run(arguments[2], arguments + 3);
    if (count == 2 && !strcmp(arguments[1], "run"))
        return run(NULL, arguments + 2);
    if (count >= 3 && !strcmp(arguments[1], "receive"))
        return receive(arguments[2], arguments + 3);
    fprintf(stderr, "usage: c-vmm run [ADDRESS [SETTING…]] | receive ADDRESS [SETTING…]\n"
                    "a setting is NAME=VALUE (a parameter), +NAME (a capability), or tls=DIRECTORY\n");
    return 2;
}
