//! Runs cases under the filters of the table, and compares the recorded calls with its lines.
#![allow(clippy::print_stderr, reason = "names the case of a failure")]

use std::collections::{BTreeMap, BTreeSet};

use sterna::ThreadRole;
use sterna::sandbox::{Argument, Feature, Syscall, TABLE, Thread};

use crate::child::skipped;
use crate::locked::{DESTINATION_CALLER, DRIVER, Locked, Outside, SOURCE_CALLER};
use crate::recorder::{Record, STARTING, recorded};

/// A use of the engine in a sandbox.
pub trait Scenario {
    fn name(&self) -> &'static str;
    fn features(&self) -> Vec<Feature>;
    /// The caller without CAP_SYS_PTRACE, whose side opens `/dev/userfaultfd`.
    fn lacks_userfaultfd(&self) -> Option<u32> {
        None
    }
}

/// Runs cases under their filters. A call outside of the table ends the child with the call's name. A line of `checked`
/// that no case needs fails the test: without that line, the case that needs it would fail. `perform` returns whether
/// this host has what the case needs.
pub fn check<C: Scenario + Sync>(
    cases: &[C],
    perform: impl Fn(&C, &Outside, &Locked) -> bool + Sync,
    checked: impl Fn(&Syscall) -> bool,
) {
    // STERNA_RECORD_CALLS=FILE: without filters, to learn of all new calls in one run.
    let record_to = std::env::var_os("STERNA_RECORD_CALLS");
    let outside = Outside::new();
    let mut needed = BTreeSet::new();
    let mut missing = BTreeSet::new();
    for case in cases {
        let features = case.features();
        let locked = Locked::new(&features, case.lacks_userfaultfd(), record_to.is_none());
        // The last line names the case of a call that is refused.
        eprintln!("case {}", case.name());
        let (is_run, records) = recorded(|| perform(case, &outside, &locked));
        if !is_run {
            skipped(case.name(), "this host lacks what it needs; its lines are not checked");
            needed.extend((0..TABLE.len()).filter(|index| features.contains(&TABLE[*index].feature)));
            continue;
        }
        let records: Vec<Record> = records.into_iter().filter(|record| record.role != DRIVER).collect();
        if let Some(to) = &record_to {
            dump(to, case.name(), &records);
        }
        let looks_up = |record: &&Record| {
            thread_of(record.role) == Some(Thread::Engine(ThreadRole::Resolve))
                || record.path().starts_with("/etc/")
        };
        let lookup = records.iter().find(looks_up).map(shown);
        assert!(lookup.is_none(), "{}: a number is looked up: {lookup:?}", case.name());
        for record in &records {
            match lines_for(record, &features)[..] {
                [] => drop(missing.insert(format!("{}: {}", case.name(), shown(record)))),
                [only] => drop(needed.insert(only)),
                _ => {}
            }
        }
    }
    assert!(missing.is_empty(), "not in the table: {missing:#?}");
    let unused = (0..TABLE.len()).filter(|index| !needed.contains(index)).map(|index| TABLE[index]);
    let unused: Vec<_> = unused.filter(|call| checked(call) && !is_rare(call)).collect();
    assert!(unused.is_empty(), "no case needs these lines: {unused:#?}");
}

/// The thread of a record; `None` while a thread of the engine starts.
fn thread_of(role: u32) -> Option<Thread> {
    match role {
        SOURCE_CALLER => Some(Thread::SourceCaller),
        DESTINATION_CALLER => Some(Thread::DestinationCaller),
        STARTING => None,
        index => Some(Thread::Engine(ThreadRole::ALL[index as usize])),
    }
}

/// The lines of the table that allow a thread's own call.
fn lines_for(record: &Record, features: &[Feature]) -> Vec<usize> {
    let is_used =
        |feature| matches!(feature, Feature::Runtime | Feature::Always) || features.contains(&feature);
    let thread = thread_of(record.role);
    let allows = |call: &Syscall| {
        let is_made = thread.map_or(call.threads.is_empty(), |thread| call.is_made_by(thread));
        let is_allowed = call.number == record.number && call.argument.allows(&record.arguments);
        is_used(call.feature) && is_made && is_allowed
    };
    TABLE.iter().enumerate().filter(|(_, call)| allows(call)).map(|(index, _)| index).collect()
}

fn shown(record: &Record) -> String {
    let name = TABLE.iter().find(|call| call.number == record.number).map_or("unknown", |call| call.name);
    let path = if record.number == libc::SYS_openat { record.path() } else { String::new() };
    let at = thread_of(record.role).map_or("a starting thread".to_owned(), |thread| format!("{thread:?}"));
    format!("{at}: {name} ({}) {:x?} {path}", record.number, &record.arguments[..3])
}

/// Whether a line may be unused in a run, because its call depends on timing or on more than this host has.
fn is_rare(call: &Syscall) -> bool {
    match call.argument {
        // Dirty rings are only reset if a vCPU has written. The tests of the reference machine run one.
        Argument::Is { name, .. } => name == "KVM_RESET_DIRTY_RINGS",
        // Versions of the C library differ in the call of `stat(2)`.
        _ if ["fstat", "newfstatat"].contains(&call.name) => true,
        // Only some runs make these calls: a thread waits for a lock, the process is stopped during a wait, or the
        // allocator grows the heap or counts processors.
        _ => {
            let rare =
                ["brk", "clock_nanosleep", "mremap", "openat", "read", "restart_syscall", "sched_yield"];
            call.feature == Feature::Runtime && rare.contains(&call.name)
        }
    }
}

/// Writes all calls for the one who maintains the table: scene, thread, number, arguments, path, count.
fn dump(to: &std::ffi::OsStr, scene: &str, records: &[Record]) {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for record in records {
        let [_, at1, at2] = [0, 1, 2].map(|index| record.arguments[index]);
        let path = if record.number == libc::SYS_openat { record.path() } else { String::new() };
        let (role, first) = (record.role, record.arguments[0] as u32);
        let thread = thread_of(role).map_or("starting".to_owned(), |thread| format!("{thread:?}"));
        let line =
            format!("{scene}\t{thread}\t{}\t{first}\t{}\t{}\t{path}", record.number, at1 as u32, at2 as u32);
        *seen.entry(line).or_default() += 1;
    }
    let text: String = seen.into_iter().map(|(line, count)| format!("{line}\t{count}\n")).collect();
    let mut file = std::fs::File::options().create(true).append(true).open(to).unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
}
