//! Records the system calls of threads in this process, by a seccomp filter that reports each call to a supervisor.
//!
//! The filter is inherited, so one thread that installs it is enough. The supervisor lets each call continue. It must not
//! allocate: a thread that is stopped inside of the allocator may hold a lock.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering};
use std::time::Duration;

/// An invalid option of `prctl`, by which a thread tells the supervisor its role. The kernel refuses it.
pub const MARK: u64 = 0x5374_726e;
/// Role of a thread that has not told its own.
pub const STARTING: u32 = u32::MAX;
const MOST_RECORDS: usize = 600_000;
const MOST_THREADS: usize = 512;
const PATH_BYTES: usize = 48;

/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)`.
const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;

/// A call of a thread.
#[derive(Clone, Copy)]
pub struct Record {
    /// What the thread gave as its role, or [`STARTING`].
    pub role: u32,
    pub number: i64,
    pub arguments: [u64; 6],
    path: [u8; PATH_BYTES],
}

impl Record {
    /// The path of an `openat`, cut at 48 bytes.
    pub fn path(&self) -> String {
        let end = self.path.iter().position(|byte| *byte == 0).unwrap_or(PATH_BYTES);
        String::from_utf8_lossy(&self.path[..end]).into_owned()
    }
}

static LISTENER: AtomicI32 = AtomicI32::new(-1);
static IS_OVER: AtomicBool = AtomicBool::new(false);
/// A call that a strict filter has refused: number, three arguments, role of the thread.
static REFUSED: [AtomicI64; 5] = [const { AtomicI64::new(-1) }; 5];

thread_local! {
    static ROLE: Cell<u32> = const { Cell::new(STARTING) };
}

/// Runs `act` on a thread whose calls, and those of all threads that it starts, are recorded.
pub fn recorded<T: Send>(act: impl FnOnce() -> T + Send) -> (T, Vec<Record>) {
    watch_refusals();
    LISTENER.store(-1, Ordering::Release);
    IS_OVER.store(false, Ordering::Release);
    let rest = Arc::new(AtomicI32::new(-1));
    let late = Arc::clone(&rest);
    std::thread::spawn(move || continue_late(&late));
    std::thread::scope(|scope| {
        let supervisor = scope.spawn(supervise);
        let result = scope
            .spawn(|| {
                install_listener();
                act()
            })
            .join();
        IS_OVER.store(true, Ordering::Release);
        let records = supervisor.join().unwrap();
        rest.store(LISTENER.load(Ordering::Acquire), Ordering::Release);
        match result {
            Ok(result) => (result, records),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Tells the supervisor the role of the calling thread.
pub fn mark(role: u32) {
    ROLE.set(role);
    // SAFETY: the kernel knows no such option and reads no memory.
    unsafe { libc::syscall(libc::SYS_prctl, MARK, u64::from(role), 0, 0, 0) };
}

fn install_listener() {
    let mut filter = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_USER_NOTIF }];
    let program = libc::sock_fprog { len: 1, filter: filter.as_mut_ptr() };
    // SAFETY: the program is live during the call, and the descriptor is stored without a further call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let fd = libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program);
        // A check would need a call if it failed; the supervisor checks the number.
        LISTENER.store(fd as i32, Ordering::Release);
    }
}

fn supervise() -> Vec<Record> {
    let mut records = Vec::with_capacity(MOST_RECORDS);
    let mut roles = [(0i32, STARTING); MOST_THREADS];
    let listener = loop {
        match LISTENER.load(Ordering::Acquire) {
            -1 => std::thread::sleep(Duration::from_millis(1)),
            fd => break fd,
        }
    };
    assert!(listener >= 0, "no listener");
    loop {
        report_refusal();
        if !is_waiting(listener) {
            if IS_OVER.load(Ordering::Acquire) {
                return records;
            }
            continue;
        }
        // SAFETY: both structures are plain data, for which zeros are valid, and live during the calls.
        unsafe {
            let mut notice: libc::seccomp_notif = std::mem::zeroed();
            if libc::ioctl(listener, NOTIF_RECV, &raw mut notice) < 0 {
                continue;
            }
            note(&mut records, &mut roles, &notice);
            let mut answer: libc::seccomp_notif_resp = std::mem::zeroed();
            answer.id = notice.id;
            answer.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
            libc::ioctl(listener, NOTIF_SEND, &raw mut answer);
        }
    }
}

/// Lets calls of threads continue that outlive the recording. Otherwise they would wait, and may hold a lock of the C library.
fn continue_late(rest: &AtomicI32) {
    let listener = loop {
        match rest.load(Ordering::Acquire) {
            -1 => std::thread::sleep(Duration::from_millis(1)),
            fd => break fd,
        }
    };
    let mut poll = libc::pollfd { fd: listener, events: libc::POLLIN, revents: 0 };
    // No thread has the filter any more if the other end is closed.
    while poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) == 0 {
        // SAFETY: the structures are plain data, for which zeros are valid, and live during the calls.
        unsafe {
            if libc::poll(&raw mut poll, 1, 1000) <= 0 || poll.revents & libc::POLLIN == 0 {
                continue;
            }
            let mut notice: libc::seccomp_notif = std::mem::zeroed();
            if libc::ioctl(listener, NOTIF_RECV, &raw mut notice) == 0 {
                let mut answer: libc::seccomp_notif_resp = std::mem::zeroed();
                answer.id = notice.id;
                answer.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
                libc::ioctl(listener, NOTIF_SEND, &raw mut answer);
            }
        }
    }
}

fn is_waiting(listener: RawFd) -> bool {
    let mut poll = libc::pollfd { fd: listener, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live structure is passed.
    unsafe { libc::poll(&raw mut poll, 1, 20) > 0 && poll.revents & libc::POLLIN != 0 }
}

fn note(records: &mut Vec<Record>, roles: &mut [(i32, u32); MOST_THREADS], notice: &libc::seccomp_notif) {
    let (thread, data) = (notice.pid as i32, &notice.data);
    let slot = roles.iter().position(|(id, _)| *id == thread);
    let slot = slot.or_else(|| roles.iter().position(|(id, _)| *id == 0)).expect("fewer threads");
    roles[slot].0 = thread;
    let number = i64::from(data.nr);
    if number == libc::SYS_prctl && data.args[0] == MARK {
        roles[slot].1 = data.args[1] as u32;
        return;
    }
    let mut record = Record { role: roles[slot].1, number, arguments: data.args, path: [0; PATH_BYTES] };
    if number == libc::SYS_openat {
        // SAFETY: the thread is stopped in this call and gave a path that ends with a zero; reading stops there.
        unsafe {
            let from = data.args[1] as *const u8;
            for (at, byte) in record.path.iter_mut().enumerate() {
                *byte = from.add(at).read();
                if *byte == 0 {
                    break;
                }
            }
        }
    }
    if number == libc::SYS_exit {
        roles[slot] = (0, STARTING);
    }
    assert!(records.len() < MOST_RECORDS, "too many calls");
    records.push(record);
}

/// Stops a thread whose call a strict filter refuses. It makes no call, because that might be refused, too.
extern "C" fn refused(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes live structures to the handler of SIGSYS.
    unsafe {
        let registers = &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        // `si_syscall` follows the address of the call.
        let number = info.cast::<i32>().add(6).read();
        REFUSED[1].store(registers[libc::REG_RDI as usize], Ordering::Relaxed);
        REFUSED[2].store(registers[libc::REG_RSI as usize], Ordering::Relaxed);
        REFUSED[3].store(registers[libc::REG_RDX as usize], Ordering::Relaxed);
        REFUSED[4].store(i64::from(ROLE.get()), Ordering::Relaxed);
        REFUSED[0].store(i64::from(number), Ordering::Release);
    }
    loop {
        std::hint::spin_loop();
    }
}

fn watch_refusals() {
    // SAFETY: the handler is a function of this type, and only stores numbers.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = refused as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Ends the process with the name of a refused call, because the refused thread waits without end.
#[allow(clippy::print_stderr, reason = "names the call")]
fn report_refusal() {
    let number = REFUSED[0].load(Ordering::Acquire);
    if number >= 0 {
        let arguments = [1, 2, 3].map(|at| REFUSED[at].load(Ordering::Relaxed));
        let name = sterna::sandbox::TABLE.iter().find(|call| call.number == number).map(|call| call.name);
        eprintln!(
            "REFUSED {} (number {number}), arguments {arguments:x?}, role {}",
            name.unwrap_or("unknown"),
            REFUSED[4].load(Ordering::Relaxed)
        );
        std::process::exit(31);
    }
}
