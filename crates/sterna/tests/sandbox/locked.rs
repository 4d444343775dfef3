//! Locks threads in: each thread has exactly the rules of the table.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use sterna::sandbox::{self, Argument, Feature, Thread};
use sterna::{OnThreadStart, ThreadRole};

use crate::recorder::{MARK, mark};

/// Role numbers of the recorder: the index of the engine's role, or one of these.
pub const SOURCE_CALLER: u32 = 500;
pub const DESTINATION_CALLER: u32 = 501;
/// The test's own thread, whose calls are not compared with the table.
pub const DRIVER: u32 = 999;

/// Every thread of the engine, and the threads that start the sides, have exactly the rules of the table.
pub struct Locked {
    programs: Arc<Programs>,
    /// The caller whose side may not make a userfaultfd by itself.
    lacks_userfaultfd: Option<u32>,
}

/// Filters by the number of the role. Without filters the calls are only recorded.
type Programs = BTreeMap<u32, BpfProgram>;

impl Locked {
    /// `is_strict`: every thread has its filter. Otherwise the calls are only recorded.
    pub fn new(features: &[Feature], lacks_userfaultfd: Option<u32>, is_strict: bool) -> Self {
        let threads = (0..).zip(ThreadRole::ALL).map(|(index, role)| (index, Thread::Engine(*role)));
        let callers =
            [(SOURCE_CALLER, Thread::SourceCaller), (DESTINATION_CALLER, Thread::DestinationCaller)];
        let all = threads.chain(callers).filter(|_| is_strict);
        let programs = all.map(|(number, thread)| (number, program(features, thread))).collect();
        Self { programs: Arc::new(programs), lacks_userfaultfd }
    }

    /// Runs `act` on a new thread with the filter of this role.
    pub fn on<T: Send>(&self, role: u32, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let caller = scope.spawn(move || {
                mark(DRIVER);
                if self.lacks_userfaultfd == Some(role) {
                    drop_ptrace();
                }
                enter(role, &self.programs);
                let done = act();
                mark(DRIVER);
                done
            });
            caller.join().unwrap()
        })
    }

    /// The hook that locks a thread of the engine in.
    pub fn hook(&self) -> OnThreadStart {
        let programs = Arc::clone(&self.programs);
        Arc::new(move |role: ThreadRole| {
            let index = ThreadRole::ALL.iter().position(|one| *one == role).unwrap();
            enter(index as u32, &programs);
        })
    }
}

/// Locks the calling thread in.
fn enter(role: u32, programs: &Programs) {
    mark(role);
    if let Some(program) = programs.get(&role) {
        seccompiler::apply_filter(program).unwrap();
    }
}

/// The filter of a thread: the rules of the table, and the test's own mark.
fn program(features: &[Feature], thread: Thread) -> BpfProgram {
    let condition = |index, operator, value: u32| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, u64::from(value)).unwrap()
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut whole = Vec::new();
    for call in sandbox::rules(features, thread) {
        let condition = match call.argument {
            Argument::Is { index, value, .. } => condition(index, SeccompCmpOp::Eq, value),
            Argument::Lacks { index, bits, .. } => {
                condition(index, SeccompCmpOp::MaskedEq(u64::from(bits)), 0)
            }
            _ => {
                whole.push(call.number);
                continue;
            }
        };
        rules.entry(call.number).or_default().push(SeccompRule::new(vec![condition]).unwrap());
    }
    let mark = condition(0, SeccompCmpOp::Eq, MARK as u32);
    rules.entry(libc::SYS_prctl).or_default().push(SeccompRule::new(vec![mark]).unwrap());
    whole.into_iter().for_each(|number| drop(rules.insert(number, Vec::new())));
    let (mismatch, matching) = (SeccompAction::Trap, SeccompAction::Allow);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    SeccompFilter::new(rules, mismatch, matching, arch).unwrap().try_into().unwrap()
}

/// Takes CAP_SYS_PTRACE from this thread and the threads that it starts.
fn drop_ptrace() {
    const SYS_PTRACE: u32 = 1 << 19;
    let header = [0x2008_0522u32, 0];
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: both structures of version 3 have these words, and are live.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[0][0] &= !SYS_PTRACE;
        sets[0][1] &= !SYS_PTRACE;
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Runs closures on a thread that was started before the filter.
pub struct Outside(Sender<Job>);

impl Outside {
    pub fn new() -> Self {
        let (jobs, todo): (Sender<Job>, Receiver<Job>) = channel();
        std::thread::spawn(move || todo.into_iter().for_each(|job| job()));
        Self(jobs)
    }

    pub fn run<T: Send + 'static>(&self, act: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = channel();
        self.0.send(Box::new(move || done.send(act()).unwrap())).unwrap();
        result.recv().unwrap()
    }
}
