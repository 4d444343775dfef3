//! A QEMU that sends frames, and its network as seen from outside. The connections of its standby can be cut
//! or frozen.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna::{Address, Capabilities, Parameters, VmError};
use sterna_arbiter::{Generation, GuestName, Identity, Spec};
use sterna_drive::Vm;
use sterna_drive::protect::{ProtectRequest, QemuProtection};
use sterna_image::{Image, MappedOptions};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Builder, Failure, Guest, NUMBER_ADDRESS, NUMBER_IN_FRAME, Qemu, Root};
use sterna_opaque::ImagePlan;
use sterna_qmp::Endpoint;
use sterna_standby::machines::Ruling;
use sterna_standby::{
    ArbiterIdentity, ArbiterStore, Claims, OperatorsWord, Protection, Secret, Standby, StandbyContact,
    StandbyGuest, StandbyOptions, Terms,
};
use sterna_transport::{CancelFlag, Channel, Tls, TlsEndpoint};

/// Limit of the last frames before a planned takeover that may be lost.
const MOST_MISSING: u32 = 8;
/// A lease that never ends, because it is longer than any test.
pub(super) const LONG: Duration = Duration::from_secs(600);
/// After this time without a frame, no further frame is expected.
const SILENCE: Duration = Duration::from_millis(500);

pub(super) fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, Failure> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(found) = look() {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("{what} did not come"))
}

/// The network of the guest's card. Every frame arrives, and waits until it is read.
pub(super) struct Network {
    stream: UnixStream,
    bytes: Vec<u8>,
    /// Number of the last frame.
    pub(super) last: u32,
}

impl Network {
    /// Reads the next frame, within `limit`. Its number must be the previous one plus 1.
    fn hear(&mut self, limit: Duration) -> Result<bool, Failure> {
        let Some(frame) = self.frame(limit)? else { return Ok(false) };
        let Some(number) = number_of(&frame) else { return Ok(true) };
        if self.last != 0 && number != self.last + 1 {
            let mut later = Vec::new();
            while later.len() < 8
                && let Some(frame) = self.frame(SILENCE)?
            {
                later.extend(number_of(&frame));
            }
            return Err(format!("frame {number} came after {}, then {later:?}", self.last));
        }
        self.last = number;
        Ok(true)
    }

    /// The next frame of any kind, within `limit`. None if none arrives, or if the connection is closed.
    fn frame(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, Failure> {
        self.stream.set_read_timeout(Some(limit)).map_err(|error| error.to_string())?;
        loop {
            if let Some(length) = self.bytes.first_chunk().map(|length| u32::from_be_bytes(*length) as usize)
                && self.bytes.len() >= 4 + length
            {
                return Ok(Some(self.bytes.drain(..4 + length).skip(4).collect()));
            }
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(length) if length > 0 => self.bytes.extend_from_slice(&piece[..length]),
                _ => return Ok(None),
            }
        }
    }

    /// Waits for `count` further frames.
    pub(super) fn hear_more(&mut self, count: u32) -> Result<(), Failure> {
        let until = self.last + count;
        while self.last < until {
            if !self.hear(PATIENCE)? {
                return Err(format!("no frame behind {}", self.last));
            }
        }
        Ok(())
    }

    /// Reads frames until `look` finds what it waits for. The socket has room for some 280 frames. QEMU keeps later ones, and
    /// they are lost when it ends.
    pub(super) fn hear_until<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T, Failure> {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            while self.hear(Duration::from_millis(1))? {}
            if let Some(found) = look() {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Err(format!("{what} did not come"))
    }

    /// Accepts a gap in the numbers. Frames that were never released have been lost.
    pub(super) fn forget(&mut self) {
        self.last = 0;
    }

    /// Reads frames until none arrives.
    pub(super) fn hear_out(&mut self) -> Result<(), Failure> {
        let begin = Instant::now();
        while self.hear(SILENCE)? {
            if begin.elapsed() > PATIENCE {
                return Err("it does not become silent".to_owned());
            }
        }
        Ok(())
    }
}

/// The number in a frame of the guest. None for other frames.
fn number_of(frame: &[u8]) -> Option<u32> {
    let is_numbered = frame.len() >= 60 && frame[12..14] == [0x88, 0xb5];
    let number = frame.get(NUMBER_IN_FRAME..NUMBER_IN_FRAME + 4).filter(|_| is_numbered)?;
    number.try_into().ok().map(u32::from_le_bytes)
}

/// Forwards bytes between primary and standby.
#[derive(Clone, Default)]
pub(super) struct Wire(Arc<WireState>);

#[derive(Default)]
struct WireState {
    /// One of the constants below.
    mode: AtomicU8,
    /// Limit of bytes to the standby without an answer. At this number the wire freezes. 0: no limit.
    freezes_at: AtomicU64,
    since_answer: AtomicU64,
}

const RUNS: u8 = 0;
const CUT: u8 = 1;
const FROZEN: u8 = 2;

impl Wire {
    /// Closes all connections and refuses new ones, as if the standby's process was killed.
    pub(super) fn cut(&self) {
        self.0.mode.store(CUT, Ordering::SeqCst);
    }

    /// Freezes the wire after `bytes` bytes to the standby without an answer. This is in the RAM of a
    /// checkpoint.
    pub(super) fn freeze_in_ram(&self, bytes: u64) {
        self.0.freezes_at.store(bytes, Ordering::SeqCst);
    }

    /// Forwards bytes again.
    pub(super) fn thaw(&self) {
        self.0.freezes_at.store(0, Ordering::SeqCst);
        self.0.mode.store(RUNS, Ordering::SeqCst);
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.0.mode.load(Ordering::SeqCst) == FROZEN
    }

    /// Listens at `from`, and forwards each connection to `to`.
    fn lay(&self, from: &Path, to: PathBuf) -> Result<(), Failure> {
        let listener = UnixListener::bind(from).map_err(|error| error.to_string())?;
        let this = self.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if this.0.mode.load(Ordering::SeqCst) == CUT {
                    return;
                }
                let Ok(far) = UnixStream::connect(&to) else { return };
                for (from, to, is_out) in
                    [(near.try_clone(), far.try_clone(), true), (far.try_clone(), near.try_clone(), false)]
                {
                    let (Ok(from), Ok(to)) = (from, to) else { return };
                    let this = this.clone();
                    std::thread::spawn(move || this.copy(from, to, is_out));
                }
            }
        });
        Ok(())
    }

    fn copy(&self, mut from: UnixStream, mut to: UnixStream, is_out: bool) {
        let state = &*self.0;
        let mut piece = [0; 64 << 10];
        // The read below reports any error.
        let _ = from.set_read_timeout(Some(Duration::from_millis(5)));
        loop {
            match state.mode.load(Ordering::SeqCst) {
                CUT => break,
                FROZEN => {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                _ => {}
            }
            match from.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => {
                    if is_out {
                        let sent = state.since_answer.fetch_add(length as u64, Ordering::SeqCst);
                        let most = state.freezes_at.load(Ordering::SeqCst);
                        if most > 0 && sent + length as u64 > most {
                            let _ =
                                state.mode.compare_exchange(RUNS, FROZEN, Ordering::SeqCst, Ordering::SeqCst);
                        }
                    } else if length != 52 && length != 56 {
                        // The contact's messages are not answers to the stream.
                        state.since_answer.store(0, Ordering::SeqCst);
                    }
                    // Bytes that were read before the freeze are also held back.
                    while state.mode.load(Ordering::SeqCst) == FROZEN {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    if state.mode.load(Ordering::SeqCst) == CUT {
                        break;
                    }
                    if to.write_all(&piece[..length]).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        // The connections may be closed already.
        let _ = from.shutdown(std::net::Shutdown::Both);
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

/// Requests that the standby's contact has received.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) started: AtomicBool,
    pub(super) discarded: AtomicBool,
}

impl StandbyGuest for Asked {
    fn close_channels(&self) {}
    fn prepare(&self, _: u64) -> Result<(), VmError> {
        Ok(())
    }
    fn fence(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn start(&self) -> Result<(), VmError> {
        self.started.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn discard(&self) {
        self.discarded.store(true, Ordering::SeqCst);
    }
}

/// The primary, its network, and the files of both sides.
pub(super) struct Lab {
    pub(super) primary: Qemu,
    pub(super) network: Network,
    pub(super) directory: tempfile::TempDir,
    /// Number of protections so far.
    count: u64,
}

/// One standby, for one protection.
pub(super) struct Side {
    pub(super) standby: Standby,
    pub(super) wire: Wire,
    pub(super) asked: Arc<Asked>,
    pub(super) contact: Arc<Mutex<Option<StandbyContact>>>,
    /// The contact reports held checkpoints up to this number.
    pub(super) tells: Arc<AtomicU64>,
    stream: PathBuf,
    contact_at: PathBuf,
    generation: u64,
    channels: u8,
    /// TLS settings of the primary.
    tls: Option<Tls>,
    /// The arbiter of both sides, as on a command line. Empty: the arbiter reports no identity.
    pub(super) arbiter: Arc<Mutex<String>>,
}

impl Drop for Side {
    fn drop(&mut self) {
        self.wire.cut();
    }
}

/// Wins every claim, and reports the arbiter of that text.
struct Wins {
    arbiter: String,
    protection: Protection,
}

impl Claims for Wins {
    fn claim(&self) -> Result<Ruling, String> {
        Ok(Ruling::Won)
    }

    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        if self.arbiter.is_empty() {
            return Ok(ArbiterIdentity::default());
        }
        let spec: Spec = self.arbiter.parse().map_err(|error| format!("{error}"))?;
        let opened = spec.open(PATIENCE).map_err(|error| error.to_string())?;
        let Protection { id, generation } = self.protection;
        let found = opened.arbiter.identity(&GuestName::of_id(id), Generation::new(generation));
        let store = match found.map_err(|error| error.to_string())? {
            Identity::Is(token) => ArbiterStore::Token(token),
            _ => ArbiterStore::Nothing,
        };
        Ok(ArbiterIdentity { name: self.arbiter.clone(), store })
    }
}

pub(super) fn wins() -> Arc<dyn Claims> {
    Arc::new(|| Ok(Ruling::Won))
}

impl Lab {
    /// A guest that sends frames.
    pub(super) fn talking(root: &Root) -> Result<Self, Failure> {
        let mut lab = Self::new(root, Guest::Talker, &[])?;
        lab.network.hear_more(3)?;
        Ok(lab)
    }

    /// Resumes the guest in an image. Its first frame must follow the last heard one closely and not repeat
    /// it. QEMU does not report when it has sent everything that it has read. On a busy host, some of the
    /// last frames may therefore be missing.
    pub(super) fn talks_on(root: &Root, image: &Path, heard: u32) -> Result<(), Failure> {
        let mut lab = Self::begun(Qemu::builder(root).memory_mib(32).guest(Guest::Talker).incoming_defer())?;
        lab.primary.capabilities(&["mapped-ram"])?;
        lab.primary.incoming(&format!("file:{}", image.display()))?;
        lab.network.hear_more(1)?;
        let first = lab.network.last;
        if first <= heard || first > heard + MOST_MISSING {
            return Err(format!("the survivor goes on with frame {first} behind {heard}"));
        }
        lab.network.hear_more(3)
    }

    pub(super) fn new(root: &Root, guest: Guest, arguments: &[&str]) -> Result<Self, Failure> {
        Self::begun(Qemu::builder(root).memory_mib(32).guest(guest).args(arguments))
    }

    fn begun(builder: Builder) -> Result<Self, Failure> {
        let directory =
            tempfile::Builder::new().prefix("sterna-").tempdir().map_err(|error| error.to_string())?;
        let place = directory.path().display().to_string();
        let network =
            UnixListener::bind(directory.path().join("network")).map_err(|error| error.to_string())?;
        let netdev = format!("stream,id=n0,server=off,addr.type=unix,addr.path={place}/network");
        let primary = builder.args(&["-netdev", &netdev]).spawn()?;
        let (stream, _) = network.accept().map_err(|error| error.to_string())?;
        let network = Network { stream, bytes: Vec::new(), last: 0 };
        Ok(Self { primary, network, directory, count: 0 })
    }

    /// A standby that waits for a primary.
    pub(super) fn standby(&mut self, channels: u8) -> Result<Side, Failure> {
        self.standby_with(channels, None)
    }

    /// The same with TLS: the settings of standby and primary.
    pub(super) fn standby_with(&mut self, channels: u8, tls: Option<(Tls, Tls)>) -> Result<Side, Failure> {
        let (tls, client) = tls.unzip();
        self.count += 1;
        let count = self.count;
        let path = |what: &str| self.directory.path().join(format!("{what}{count}"));
        let parameters =
            Parameters { multifd_channels: channels.max(1), tls: tls.clone(), ..Parameters::default() };
        let capabilities = Capabilities { multifd: channels > 0, ..Capabilities::default() };
        let standby = Standby::listen(
            &Address::Unix(path("standby")),
            &StandbyOptions::default(),
            parameters,
            capabilities,
            Arc::new(()),
        )
        .map_err(|error| error.to_string())?;
        let wire = Wire::default();
        let (stream, contact_at) = (path("stream"), path("contact"));
        wire.lay(&stream, path("standby"))?;
        wire.lay(&contact_at, path("greets"))?;
        let side = Side {
            standby,
            wire,
            asked: Arc::default(),
            contact: Arc::default(),
            tells: Arc::new(AtomicU64::new(u64::MAX)),
            stream,
            contact_at,
            generation: count,
            channels,
            tls: client,
            arbiter: Arc::default(),
        };
        side.greet(&path("greets"), tls)?;
        Ok(side)
    }

    /// Protects the guest. The lease never ends unless one is given.
    pub(super) fn protect(
        &self,
        side: &Side,
        lease: Option<Duration>,
        claims: Arc<dyn Claims>,
    ) -> Result<QemuProtection, Failure> {
        self.begin(side.request(lease), claims)
    }

    pub(super) fn begin(
        &self,
        request: ProtectRequest,
        claims: Arc<dyn Claims>,
    ) -> Result<QemuProtection, Failure> {
        Self::begin_at(self.primary.operator_socket(), request, claims)
    }

    fn begin_at(
        monitor: PathBuf,
        request: ProtectRequest,
        claims: Arc<dyn Claims>,
    ) -> Result<QemuProtection, Failure> {
        let vm = Vm::connect(&Endpoint::Unix(monitor)).map_err(|error| error.to_string())?;
        QemuProtection::begin(vm, request, claims).map_err(|error| error.to_string())
    }

    /// The same, and calls `act` before QEMU gets `migrate`.
    pub(super) fn begin_and_before_migrate(
        &self,
        request: ProtectRequest,
        claims: Arc<dyn Claims>,
        act: impl Fn() + Send + 'static,
    ) -> Result<QemuProtection, Failure> {
        let between = self.directory.path().join("between");
        let listener = UnixListener::bind(&between).map_err(|error| error.to_string())?;
        let far = UnixStream::connect(self.primary.operator_socket()).map_err(|error| error.to_string())?;
        std::thread::spawn(move || -> std::io::Result<()> {
            let (near, _) = listener.accept()?;
            let (mut from, mut to) = (far.try_clone()?, near.try_clone()?);
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            for line in BufReader::new(near).lines() {
                let line = line?;
                if line.contains(r#""migrate""#) {
                    act();
                }
                writeln!(&far, "{line}")?;
            }
            far.shutdown(std::net::Shutdown::Both)
        });
        Self::begin_at(between, request, claims)
    }

    /// Waits until the primary knows that the standby holds this checkpoint.
    pub(super) fn wait_until_held(
        &mut self,
        side: &Side,
        protection: &QemuProtection,
        number: u64,
    ) -> Result<(), Failure> {
        let held = wait(&format!("checkpoint {number}"), || {
            let now = protection.statistics();
            match now.contact.outcome {
                Some(outcome) => Some(Err(format!("{outcome:?}: {:?}", now.contact.trouble))),
                None => (now.held >= number).then_some(Ok(())),
            }
        });
        if held.is_err() {
            let (here, there) = (protection.statistics(), side.standby.statistics());
            #[allow(clippy::print_stderr, reason = "a failing test says what it knows")]
            {
                eprintln!("{here:?}\n{there:?}\n{}", self.primary.describe_state());
            }
        }
        held?
    }
}

impl Side {
    fn greet(&self, at: &Path, tls: Option<Tls>) -> Result<(), Failure> {
        let listener = UnixListener::bind(at).map_err(|error| error.to_string())?;
        let (asked, contact, tells) =
            (Arc::clone(&self.asked), Arc::clone(&self.contact), Arc::clone(&self.tells));
        let (standby, wire, arbiter) = (self.standby.clone(), self.wire.clone(), Arc::clone(&self.arbiter));
        std::thread::spawn(move || {
            let Ok((socket, _)) = listener.accept() else { return };
            let Ok(channel) = Channel::from_fd(socket.into()) else { return };
            if let Some(tls) = tls {
                let cancel = CancelFlag::new();
                if channel.start_tls(&tls, TlsEndpoint::Server, None, PATIENCE, &cancel).is_err() {
                    return;
                }
            }
            let claims = |protection: Protection| {
                Arc::new(Wins { arbiter: arbiter.lock().unwrap().clone(), protection }) as Arc<dyn Claims>
            };
            let Ok(greeted) = StandbyContact::begin(&Arc::new(channel), &secret(), asked, claims) else {
                return;
            };
            *contact.lock().unwrap() = Some(greeted.clone());
            let mut told = 0;
            while wire.0.mode.load(Ordering::SeqCst) != CUT {
                while !wire.is_frozen()
                    && told < standby.statistics().checkpoints.min(tells.load(Ordering::SeqCst))
                {
                    told += 1;
                    greeted.checkpoint_held(told).unwrap();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Ok(())
    }

    pub(super) fn request(&self, lease: Option<Duration>) -> ProtectRequest {
        let protection = Protection { id: [7; 16], generation: self.generation };
        let terms = match lease {
            Some(lease) => Terms { lease, ..Terms::default() },
            None => Terms { lease: LONG, ..Terms::default() },
        };
        ProtectRequest {
            contact: Some(Address::Unix(self.contact_at.clone())),
            terms,
            channels: self.channels,
            tls: self.tls.clone(),
            ..ProtectRequest::new(Address::Unix(self.stream.clone()), protection, secret())
        }
    }

    pub(super) fn stream(&self) -> String {
        format!("unix:{}", self.stream.display())
    }

    pub(super) fn contact_address(&self) -> String {
        format!("unix:{}", self.contact_at.display())
    }

    /// Takes over into an image. Returns the number of the last frame that the held guest sent.
    pub(super) fn take_over(&self, image: &Path) -> Result<u32, Failure> {
        let plan = ImagePlan { path: image.to_owned(), options: MappedOptions::default(), convert: None };
        self.standby.takeover(&plan, &OperatorsWord).map_err(|error| error.to_string())?;
        number_in(image)
    }
}

/// Number of the last frame that the guest in an image sent.
pub(super) fn number_in(image: &Path) -> Result<u32, Failure> {
    word_in(image, NUMBER_ADDRESS)
}

/// A word of the memory in an image.
pub(super) fn word_in(image: &Path, address: u64) -> Result<u32, Failure> {
    let image = Image::open(image).map_err(|error| error.to_string())?;
    let block =
        image.shape().ram.blocks.iter().position(|block| block.name == "pc.ram").ok_or("no pc.ram")?;
    let mut page = [0; 4096];
    let mapped = image.mapped().ok_or("no mapped-ram")?;
    mapped.read(block, address >> 12, &mut page).map_err(|error| error.to_string())?;
    let at = (address & 0xfff) as usize;
    Ok(u32::from_le_bytes(page[at..at + 4].try_into().map_err(|_| "no number")?))
}

fn secret() -> Secret {
    Secret::from_bytes([0; 32])
}
