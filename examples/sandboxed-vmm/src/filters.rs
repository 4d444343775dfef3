//! A seccomp filter for each thread: the engine's table, and the calls of this VMM's own code on that thread.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use sterna::sandbox::{self, Argument, Feature, Syscall, Thread};
use sterna::{OnThreadStart, ThreadRole};

/// What this VMM uses of the engine.
const FEATURES: &[Feature] =
    &[Feature::Sockets, Feature::Unix, Feature::Multifd, Feature::KvmDirtyLog, Feature::FilterPerThread];

/// The VMM's own calls in callbacks: signals for the vCPU, its registers, and events on standard output.
const CALLBACKS: &[i64] = &[libc::SYS_tgkill, libc::SYS_getpid, libc::SYS_write, libc::SYS_ioctl];

/// The VMM's own calls on the event loop, and on the vCPU's thread, which the loop starts.
const EVENT_LOOP: &[i64] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_brk,
    libc::SYS_mremap,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_exit_group,
];

/// Locks in the calling thread, and each thread that it starts.
pub fn lock_event_loop() -> Result<(), Box<dyn Error>> {
    let both = [Thread::SourceCaller, Thread::DestinationCaller];
    let calls = both.into_iter().flat_map(|thread| sandbox::rules(FEATURES, thread));
    let own = [CALLBACKS, EVENT_LOOP].concat();
    Ok(seccompiler::apply_filter(&program(calls, &own)?)?)
}

/// The hook of the engine's threads: each installs its own filter.
pub fn hook() -> Result<OnThreadStart, Box<dyn Error>> {
    let of_role = |role: &ThreadRole| {
        let calls = sandbox::rules(FEATURES, Thread::Engine(*role));
        Ok((*role, program(calls.into_iter(), CALLBACKS)?))
    };
    let programs: Result<Vec<_>, Box<dyn Error>> = ThreadRole::ALL.iter().map(of_role).collect();
    let programs = programs?;
    Ok(Arc::new(move |role| {
        let program = programs.iter().find(|(one, _)| *one == role).map(|(_, program)| program);
        // A thread without a filter must not work: the panic is the error of the migration.
        let locked = program.is_some_and(|program| seccompiler::apply_filter(program).is_ok());
        assert!(locked, "the thread {role} could not be locked in");
    }))
}

/// Translates lines of the engine's table; the VMM's own calls may have any arguments.
///
/// Every other call ends the process. Its thread and number are in the kernel's log.
fn program(calls: impl Iterator<Item = &'static Syscall>, own: &[i64]) -> Result<BpfProgram, Box<dyn Error>> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut whole = own.to_vec();
    for call in calls {
        let (index, operator, value) = match call.argument {
            Argument::Is { index, value, .. } => (index, SeccompCmpOp::Eq, value),
            Argument::Lacks { index, bits, .. } => (index, SeccompCmpOp::MaskedEq(bits.into()), 0),
            _ => {
                whole.push(call.number);
                continue;
            }
        };
        let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value.into())?;
        rules.entry(call.number).or_default().push(SeccompRule::new(vec![condition])?);
    }
    // An empty list permits the call with any arguments.
    whole.into_iter().for_each(|number| drop(rules.insert(number, Vec::new())));
    let (mismatch, matching) = (SeccompAction::KillProcess, SeccompAction::Allow);
    let arch = std::env::consts::ARCH.try_into()?;
    Ok(SeccompFilter::new(rules, mismatch, matching, arch)?.try_into()?)
}
