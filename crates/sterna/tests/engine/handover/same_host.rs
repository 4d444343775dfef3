//! The same tests on one host: memory is passed as descriptors, over a Unix socket.

use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::JoinHandle;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use sterna::{Address, MigrationMode};
use sterna_guests::model::Acts;
use sterna_guests::process::ProcessConfig;

use super::*;
use crate::support::{TestVm, assert_reset, ended, small, vm};

/// Most descriptors in one message (SCM_MAX_FD).
const MOST_DESCRIPTORS: usize = 253;
/// Time in which a receiver has acted on a message.
const SETTLED: Duration = Duration::from_millis(30);

/// Forwards Unix connections with their descriptors; a filter decides about each piece.
struct UnixProxy {
    directory: tempfile::TempDir,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    to: PathBuf,
    filter: Mutex<Filter>,
    sockets: Mutex<Vec<UnixStream>>,
    pumps: Mutex<Vec<JoinHandle<()>>>,
    ends: AtomicBool,
}

impl UnixProxy {
    fn new(to: &Path, filter: Filter) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("proxy")).unwrap();
        let shared = Arc::new(Shared {
            to: to.to_owned(),
            filter: Mutex::new(filter),
            sockets: Mutex::default(),
            pumps: Mutex::default(),
            ends: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accepting.accept(&listener));
        Self { directory, shared, acceptor: Some(acceptor) }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("proxy")
    }
}

impl Drop for UnixProxy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        drop(UnixStream::connect(self.path()));
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().unwrap();
        }
        self.shared.cut();
        for pump in std::mem::take(&mut *self.shared.pumps.lock().unwrap()) {
            pump.join().unwrap();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        while let Ok((from, _)) = listener.accept() {
            if self.ends.load(Ordering::SeqCst) {
                return;
            }
            let Ok(to) = UnixStream::connect(&self.to) else { continue };
            let clones = [from.try_clone().unwrap(), to.try_clone().unwrap()];
            self.sockets.lock().unwrap().extend(clones);
            let line = Arc::new(Mutex::new(Line::Other));
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            for (way, (from, to)) in [(proxy::Way::Forward, (from, to)), (proxy::Way::Back, back)] {
                let (this, line) = (Arc::clone(self), Arc::clone(&line));
                let pump = std::thread::spawn(move || this.pump(way, &line, &from, &to));
                self.pumps.lock().unwrap().push(pump);
            }
        }
    }

    fn pump(&self, way: proxy::Way, line: &Mutex<Line>, from: &UnixStream, mut to: &UnixStream) {
        let mut offset = 0;
        while let Some((mut piece, descriptors)) = receive(from) {
            if offset == 0 && way == proxy::Way::Forward && piece.starts_with(b"QEVM") {
                *line.lock().unwrap() = Line::Main;
            }
            let line = *line.lock().unwrap();
            let mut filter = self.filter.lock().unwrap();
            let (count, verdict) = (piece.len(), filter(line, way, offset, &mut piece));
            offset += count as u64;
            if verdict == Verdict::Pass {
                drop(filter);
                if send(to, &piece, &descriptors).is_err() {
                    break;
                }
                continue;
            }
            // The filter stays locked, so no other thread forwards a piece. Descriptors are forwarded only with a
            // complete piece.
            let whole = piece.len() == count;
            let _ = send(to, &piece, if whole { &descriptors[..] } else { &[] });
            if verdict == Verdict::CutSettled {
                std::thread::sleep(SETTLED);
            }
            self.cut();
            return;
        }
        let _ = to.flush();
        let _ = to.shutdown(std::net::Shutdown::Write);
    }

    fn cut(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The next bytes with their descriptors; `None` at the end.
fn receive(from: &UnixStream) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let (mut control, mut bytes) = (RecvAncillaryBuffer::new(&mut space), vec![0; 64 << 10]);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).ok()?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let descriptors = rights.flatten().collect();
    bytes.truncate(got.bytes);
    (got.bytes > 0).then_some((bytes, descriptors))
}

/// Sends the descriptors with the piece's last byte, because the kernel ends a read after the piece that carries
/// descriptors.
fn send(mut to: &UnixStream, piece: &[u8], descriptors: &[OwnedFd]) -> std::io::Result<()> {
    let Some((last, before)) = piece.split_last().filter(|_| !descriptors.is_empty()) else {
        return to.write_all(piece);
    };
    to.write_all(before)?;
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "they came in one message");
    sendmsg(to, &[IoSlice::new(std::slice::from_ref(last))], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A guest that zeroes pages, and its destination.
fn machines() -> (Arc<TestVm>, Arc<TestVm>) {
    let config = ProcessConfig { acts: Acts::MIXED, ..small() };
    let (source, target) = common::pair(&config);
    (TestVm::new(source), TestVm::new(target))
}

/// Moves the guest through `filter`. Returns whether it arrived, and asserts that it is complete on its side.
fn moved(source: &Arc<TestVm>, target: &Arc<TestVm>, filter: Filter) -> bool {
    let params = Parameters { mode: MigrationMode::CprTransfer, ..parameters() };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("destination");
    let at = Address::Unix(path.clone());
    let capabilities = Capabilities::default();
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let incoming = Incoming::listen(vm, &at, params.clone(), capabilities, Arc::new(())).unwrap();
    let proxy = UnixProxy::new(&path, filter);
    let migration = vm::start(source, &Address::Unix(proxy.path()), &params, capabilities, Arc::new(()));
    match (migration.wait(), ended(&incoming)) {
        (Outcome::Completed, Arrival::Completed(_)) => {
            common::assert_lives_on(&target.guest);
            true
        }
        (Outcome::Failed { held: false, .. }, Arrival::Failed(_)) => {
            tracing::debug!(error = ?incoming.statistics().error, "the move failed");
            common::assert_lives_on(&source.guest);
            assert_reset(target);
            false
        }
        (outcome, arrival) => panic!("{outcome:?}, {arrival:?}"),
    }
}

/// Runs one move with a cut. If it fails, the next move must succeed.
fn cut(filter: Filter, struck: &AtomicBool) {
    let (source, target) = machines();
    let has_arrived = moved(&source, &target, filter);
    assert!(struck.load(Ordering::SeqCst), "the message was not sent");
    if !has_arrived {
        assert!(moved(&source, &target, Box::new(|_, _, _, _| Verdict::Pass)), "the next move");
    }
}

/// Cuts at the first bytes of the connection that carries the descriptors.
fn cut_offer(way: proxy::Way, place: Place, struck: &Arc<AtomicBool>) -> Filter {
    let struck = Arc::clone(struck);
    Box::new(move |line, going, offset, piece| {
        if (line, going, offset) != (Line::Other, way, 0) || struck.swap(true, Ordering::SeqCst) {
            return Verdict::Pass;
        }
        match place {
            Place::Before => piece.clear(),
            Place::Within => piece.truncate(piece.len() / 2),
            Place::After => return Verdict::CutSettled,
        }
        Verdict::Cut
    })
}

#[test]
fn move_on_one_host_cut_at_any_message_leaves_one_whole_guest() {
    common::trace();
    let mut failures = Vec::new();
    let mut play = |name: String, make: &dyn Fn(&Arc<AtomicBool>) -> Filter| {
        let struck = Arc::new(AtomicBool::new(false));
        let filter = make(&struck);
        let cut = std::panic::AssertUnwindSafe(|| cut(filter, &struck));
        if let Err(why) = std::panic::catch_unwind(cut) {
            let why = why.downcast_ref::<String>().cloned().unwrap_or_default();
            failures.push(format!("{name}: {why}"));
        }
    };
    let has = |message: &&Message| matches!(message.when, When::Always | When::Precopy | When::SameHost);
    for place in Place::ALL {
        for message in MESSAGES.iter().filter(has) {
            play(format!("{place:?} {}", message.name), &|struck| cut_at(*message, place, struck));
        }
        for way in [proxy::Way::Forward, proxy::Way::Back] {
            play(format!("{place:?} offer {way:?}"), &|struck| cut_offer(way, place, struck));
        }
    }
    assert!(failures.is_empty(), "{} cases:\n{}", failures.len(), failures.join("\n"));
}
