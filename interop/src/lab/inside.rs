//! The lab from inside: this program as the VM's init, and again in the tree that init makes.
#![allow(clippy::print_stdout)]

use std::ffi::CString;
use std::os::unix::fs::{chroot, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::mount::MountFlags;
use rustix::system::{RebootCommand, finit_module, reboot};

use super::{ALIVE, ALIVE_EVERY, DONE, Kind, PROGRAM_VARIABLE, Selection, TARGET_TAG, TREE_TAG, rdma};
use crate::Root;
use crate::linux;
use crate::scenarios::{ALL, Failure};

/// The argument of this program in the tree.
const IN_TREE: &str = "in-tree";
/// The argument of this program as the bench's other process.
pub(super) const PEER: &str = "in-tree-peer";
/// The argument of this program as a guest that writes.
pub(super) const WRITER: &str = "in-tree-writer";
/// The argument of this program as a place of a guest that is migrated.
pub(super) const PLACE: &str = "in-tree-place";
/// Where init makes the tree.
const TREE: &str = "/tree";

/// Runs the scenarios of the kind that the kernel's command line names, says how it went, and switches the VM off.
pub fn run_as_init() -> ! {
    for (kind, at) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        told(mount(kind, kind, at, MountFlags::empty(), ""));
    }
    load_modules();
    if std::env::var(Kind::VARIABLE).is_ok_and(|name| name == linux::guest::NAME) {
        linux::guest::run();
    }
    // It ends with the VM.
    std::thread::spawn(|| {
        loop {
            println!("{ALIVE}");
            std::thread::sleep(ALIVE_EVERY);
        }
    });
    let failures = match Kind::of_environment() {
        Kind::Kvm => all(ALL.iter().map(|scenario| (scenario.name.to_owned(), scenario.run))),
        Kind::Linux | Kind::Rdma | Kind::RdmaPair => told(run_in_tree()).unwrap_or(-1),
    };
    println!("{DONE} {failures}");
    // Nothing is mounted that must be synced.
    told(reboot(RebootCommand::Restart).map_err(|error| format!("reboot: {error}")));
    loop {
        std::thread::park();
    }
}

/// If this is the program in the tree: runs the scenarios and gives the number of failures.
pub fn run_in_tree_as_asked() -> Option<u8> {
    match std::env::args().nth(1)?.as_str() {
        IN_TREE => {}
        PEER => {
            rdma::bench::serve();
            return Some(0);
        }
        WRITER => {
            rdma::bench::serve_writer();
            return Some(0);
        }
        PLACE => {
            rdma::reliability::serve();
            return Some(0);
        }
        _ => return None,
    }
    let kind = Kind::of_environment();
    if kind == Kind::Linux {
        let selection = Selection::of_environment();
        let chosen = chosen_of_linux(&selection).into_iter();
        let failures = match selection.is_bench {
            true => linux::bench::run(&selection),
            false => all(chosen.map(|one| (one.name.to_owned(), one.run))),
        };
        return Some(u8::try_from(failures).unwrap_or(u8::MAX));
    }
    let prepared = if kind == Kind::RdmaPair { rdma::two::prepare() } else { rdma::prepare() };
    let failures = match prepared {
        Ok(()) if kind == Kind::RdmaPair && rdma::two::side() == 1 => {
            i32::from(told(rdma::two::serve()).is_none())
        }
        Ok(()) => chosen(kind, &Selection::of_environment()),
        Err(why) => {
            println!("LAB no RDMA device: {why}");
            -1
        }
    };
    Some(u8::try_from(failures).unwrap_or(u8::MAX))
}

/// Runs what was selected. The number of failures.
fn chosen(kind: Kind, selection: &Selection) -> i32 {
    if selection.is_bench {
        return rdma::bench::run(selection);
    }
    if let Some(count) = selection.reliability {
        return rdma::reliability::run(selection.seed, selection.from..selection.from.saturating_add(count));
    }
    let scenarios = if kind == Kind::RdmaPair { rdma::two::scenarios() } else { rdma::scenarios() };
    let chosen = scenarios.into_iter().filter(|one| selection.takes(&one.name, one.is_long));
    all(chosen.map(|one| (one.name, one.run)))
}

fn chosen_of_linux(selection: &Selection) -> Vec<linux::Scenario> {
    match selection.reliability {
        Some(count) => vec![linux::many_moves(count, selection.seed)],
        None => linux::scenarios().into_iter().filter(|one| selection.takes(one.name, one.is_long)).collect(),
    }
}

/// Runs each, and says how it went; the number of those that failed.
fn all<F>(scenarios: impl Iterator<Item = (String, F)>) -> i32
where
    F: FnOnce() -> Result<(), Failure>,
{
    let mut failures = 0;
    for (name, run) in scenarios {
        let begin = Instant::now();
        // A panic must not end init: the kernel would follow.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        let verdict = match result.unwrap_or_else(|_| Err("it panicked".into())) {
            Ok(()) => "ok".to_owned(),
            Err(why) => {
                failures += 1;
                format!("FAILED: {why}")
            }
        };
        println!("LAB {name} ... {verdict} ({:?})", begin.elapsed());
    }
    failures
}

/// Makes a tree of the Debian root and the target directory, both of which the host shares, and runs this program in it.
///
/// Programs there see every path as in the root, and the target directory at the path that it has on the host.
fn run_in_tree() -> Result<i32, Failure> {
    let program = std::env::var(PROGRAM_VARIABLE).map_err(|_| "the command line names no program")?;
    let target = Path::new(&program).ancestors().nth(2).ok_or("the program lies in no target directory")?;
    let inside = |path: &str| format!("{TREE}/{path}");
    let make = |path: &str| std::fs::create_dir_all(path).map_err(|error| format!("{path}: {error}"));
    let shared = |tag: &str, at: &str| {
        make(at)?;
        mount(tag, "9p", at, MountFlags::RDONLY, "trans=virtio,version=9p2000.L,msize=1048576,cache=loose")
    };
    shared(TREE_TAG, "/root")?;
    make(TREE)?;
    mount("tmpfs", "tmpfs", TREE, MountFlags::empty(), "size=90%")?;
    for name in ["usr", "etc"] {
        make(&inside(name))?;
        mount(&format!("/root/{name}"), "", &inside(name), MountFlags::BIND, "")?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{name}"), inside(name)).map_err(|error| format!("{name}: {error}"))?;
    }
    for name in ["dev", "proc", "sys"] {
        make(&inside(name))?;
        mount(&format!("/{name}"), "", &inside(name), MountFlags::BIND, "")?;
    }
    for name in ["tmp", "run", "var/tmp", "roots"] {
        make(&inside(name))?;
    }
    // Programs in the tree find the root where they are.
    symlink("/", inside(&format!("roots/{}", Root::QEMU))).map_err(|error| format!("roots: {error}"))?;
    std::fs::copy(format!("/root/{}", Root::STAMP), inside(Root::STAMP))
        .map_err(|error| format!("{}: {error}", Root::STAMP))?;
    make(&inside("dev/shm"))?;
    mount("tmpfs", "tmpfs", &inside("dev/shm"), MountFlags::empty(), "size=90%")?;
    shared(TARGET_TAG, &inside(target.to_string_lossy().trim_start_matches('/')))?;
    // As the root of the mounts, too: a process below a mere chroot may make no user namespace, and passt wants one.
    std::env::set_current_dir(TREE).map_err(|error| format!("{TREE}: {error}"))?;
    rustix::mount::mount_move(".", "/").map_err(|error| format!("moving {TREE}: {error}"))?;
    chroot(".").map_err(|error| format!("chroot: {error}"))?;
    std::env::set_current_dir("/tmp").map_err(|error| format!("/tmp: {error}"))?;
    let mut command = Command::new(&program);
    command.arg(IN_TREE).env("PATH", "/usr/sbin:/usr/bin").env("STERNA_ROOTS", "/roots");
    let status = command.status().map_err(|error| format!("{program}: {error}"))?;
    Ok(status.code().unwrap_or(-1))
}

/// As mount(8); no kind is that of a directory which is mounted once more.
pub(crate) fn mount(
    source: &str,
    kind: &str,
    at: &str,
    flags: MountFlags,
    options: &str,
) -> Result<(), Failure> {
    let failed = |why: &dyn std::fmt::Display| format!("mounting {source} at {at}: {why}");
    let options = CString::new(options).map_err(|error| failed(&error))?;
    rustix::mount::mount(source, at, kind, flags, options.as_c_str()).map_err(|error| failed(&error))
}

fn told<T>(result: Result<T, Failure>) -> Option<T> {
    result.inspect_err(|why| println!("LAB {why}")).ok()
}

fn load_modules() {
    let mut modules: Vec<_> =
        std::fs::read_dir("/m").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    modules.sort();
    for path in modules {
        let Ok(file) = std::fs::File::open(&path) else { continue };
        if let Err(error) = finit_module(&file, c"", 0) {
            println!("LAB module {}: {error}", path.display());
        }
    }
}
