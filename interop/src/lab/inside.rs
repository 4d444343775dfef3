//! The lab from inside: this program runs as the VM's init, and again in the tree that init makes.
#![allow(clippy::print_stdout)]

use std::ffi::CString;
use std::os::unix::fs::{chroot, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::mount::MountFlags;
use rustix::system::{RebootCommand, finit_module, reboot};

use super::{
    ALIVE, ALIVE_EVERY, DONE, Kind, PROGRAM_VARIABLE, Selection, TARGET_TAG, TREE_TAG, modules, rdma,
};
use crate::Root;
use crate::linux;
use crate::scenarios::{ALL, Failure};

/// Argument of this program when init starts it in the tree.
const IN_TREE: &str = "in-tree";
/// Argument of this program as the bench's other process.
pub(super) const PEER: &str = "in-tree-peer";
/// Argument of this program as a guest that writes.
pub(super) const WRITER: &str = "in-tree-writer";
/// Argument of this program as one of the two processes between which a guest migrates.
pub(super) const PLACE: &str = "in-tree-place";
/// Path at which init makes the tree.
const TREE: &str = "/tree";

/// Runs the scenarios of the kind on the kernel's command line. Reports the result, and switches the VM off.
pub fn run_as_init() -> ! {
    for (kind, at) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        told(mount(kind, kind, at, MountFlags::empty(), ""));
    }
    load_modules();
    if std::env::var(Kind::VARIABLE).is_ok_and(|name| name == linux::guest::NAME) {
        linux::guest::run();
    }
    // This thread ends with the VM.
    std::thread::spawn(|| {
        loop {
            println!("{ALIVE}");
            std::thread::sleep(ALIVE_EVERY);
        }
    });
    let failures = match Kind::of_environment() {
        Kind::Kvm => all(ALL.iter().map(|scenario| (scenario.name.to_owned(), false, scenario.run))),
        Kind::Linux | Kind::Rdma | Kind::RdmaPair => told(run_in_tree()).unwrap_or(-1),
    };
    println!("{DONE} {failures}");
    // No mounted file system needs a sync.
    told(reboot(RebootCommand::Restart).map_err(|error| format!("reboot: {error}")));
    loop {
        std::thread::park();
    }
}

/// In the tree: runs the scenarios and returns the number of failures. Otherwise returns `None`.
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
            false => all(chosen.map(|one| (one.name.to_owned(), false, one.run))),
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

/// Runs the selected scenarios and returns the number of failures.
fn chosen(kind: Kind, selection: &Selection) -> i32 {
    if selection.is_bench {
        return rdma::bench::run(selection);
    }
    if let Some(count) = selection.reliability {
        return rdma::reliability::run(selection.seed, selection.from..selection.from.saturating_add(count));
    }
    let scenarios = if kind == Kind::RdmaPair { rdma::two::scenarios() } else { rdma::scenarios() };
    let chosen = scenarios.into_iter().filter(|one| selection.takes(&one.name, one.is_long));
    all(chosen.map(|one| (one.name, one.is_control, one.run)))
}

fn chosen_of_linux(selection: &Selection) -> Vec<linux::Scenario> {
    match selection.reliability {
        Some(count) => vec![linux::many_moves(count, selection.seed)],
        None => linux::scenarios().into_iter().filter(|one| selection.takes(one.name, one.is_long)).collect(),
    }
}

/// Runs the scenarios. Each is a name, whether it is a control of the lab, and a function. Reports each
/// result, and returns the number of failures. A failed control counts as skipped: the test command lists
/// `SKIPPED` by name.
fn all<F>(scenarios: impl Iterator<Item = (String, bool, F)>) -> i32
where
    F: FnOnce() -> Result<(), Failure>,
{
    let mut failures = 0;
    for (name, is_control, run) in scenarios {
        let begin = Instant::now();
        // A panic must not end init, because the kernel would then panic.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        let verdict = match result.unwrap_or_else(|_| Err("it panicked".into())) {
            Ok(()) => "ok".to_owned(),
            Err(why) if is_control => {
                println!("LAB SKIPPED {name}: it shows only that the lab works, and failed: {why}");
                "skipped".to_owned()
            }
            Err(why) => {
                failures += 1;
                format!("FAILED: {why}")
            }
        };
        println!("LAB {name} ... {verdict} ({:?})", begin.elapsed());
    }
    failures
}

/// Makes a tree of directories that the host shares, and runs this program in it. They are the Debian root
/// and the target directory.
///
/// Programs there see every path as in the root, and the target directory at its path on the host.
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
    // Programs in the tree find the root in the usual directory.
    symlink("/", inside(&format!("roots/{}", Root::QEMU))).map_err(|error| format!("roots: {error}"))?;
    std::fs::copy(format!("/root/{}", Root::STAMP), inside(Root::STAMP))
        .map_err(|error| format!("{}: {error}", Root::STAMP))?;
    make(&inside("dev/shm"))?;
    mount("tmpfs", "tmpfs", &inside("dev/shm"), MountFlags::empty(), "size=90%")?;
    shared(TARGET_TAG, &inside(target.to_string_lossy().trim_start_matches('/')))?;
    // The tree also becomes the root of the mounts, because passt needs a user namespace, which a process
    // below a chroot cannot create.
    std::env::set_current_dir(TREE).map_err(|error| format!("{TREE}: {error}"))?;
    rustix::mount::mount_move(".", "/").map_err(|error| format!("moving {TREE}: {error}"))?;
    chroot(".").map_err(|error| format!("chroot: {error}"))?;
    std::env::set_current_dir("/tmp").map_err(|error| format!("/tmp: {error}"))?;
    let mut command = Command::new(&program);
    command.arg(IN_TREE).env("PATH", "/usr/sbin:/usr/bin").env("STERNA_ROOTS", "/roots");
    let status = command.status().map_err(|error| format!("{program}: {error}"))?;
    Ok(status.code().unwrap_or(-1))
}

/// Mounts like mount(8). An empty kind is a bind mount of a directory.
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
        let parameters = std::fs::read(&path).map_or(c"", |module| modules::parameters(&module));
        if let Err(error) = finit_module(&file, parameters, 0) {
            println!("LAB module {}: {error}", path.display());
        }
    }
}
