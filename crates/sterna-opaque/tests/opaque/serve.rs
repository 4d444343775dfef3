//! An image is served to a destination that misbehaves, stalls, or reconnects. The test plays the destination byte by
//! byte.

mod images;
mod live;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::error::{BadAnswer, BadRequest, Difference, Misbehaviour};
use sterna::{MigrationError, StartError, WaitLimits};
use sterna_image::{
    BlockShape, ImageError, LegacyWriter, MappedOptions, MappedWriter, PageVisitor, RamShape, Shape,
};
use sterna_opaque::serve::{
    Access, GuestState, ImageOptions, Link, Purpose, ServeFailure, ServeOptions, ServedImage, Serving,
    Silence, Stage,
};
use sterna_transport::{CancelFlag, Channel, TransportError};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

const PAGES: [u64; 2] = [300, 70];
const NAMES: [&str; 2] = ["m0", "rom"];

fn shape() -> Shape {
    let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
    shape.configuration.machine_type = "none".into();
    let block = |(name, pages): (&str, u64)| BlockShape {
        name: name.into(),
        length_bytes: pages * 4096,
        address: None,
        host_page_bytes: None,
        is_skipped: false,
    };
    let blocks = NAMES.into_iter().zip(PAGES).map(block).collect();
    shape.ram = RamShape { section_id: 2, blocks, footers: true };
    shape.between = vec![8, 0, 11, 0, 0];
    // A FULL section "cpu" with its footer.
    shape.devices = b"\x04\0\0\0\x03\x03cpu\0\0\0\0\0\0\0\x01state\x7e\0\0\0\x03".to_vec();
    shape
}

/// Content of a page. Every third page is absent and zero; every seventh is in the image although it is zero.
fn content(block: usize, page: u64) -> Option<[u8; 4096]> {
    match page {
        page if page % 3 == 0 => None,
        page if page % 7 == 0 => Some([0; 4096]),
        page => Some(std::array::from_fn(|at| (at as u64 * (page + 3) + 7 * block as u64 + 1) as u8)),
    }
}

fn give(to: &mut dyn PageVisitor) {
    for (block, pages) in PAGES.into_iter().enumerate() {
        for page in 0..pages {
            match content(block, page) {
                Some(bytes) => to.pages(block, page, &bytes).unwrap(),
                None => to.zero(block, page, 1).unwrap(),
            }
        }
    }
}

fn mapped(directory: &Path) -> PathBuf {
    let path = directory.join("mapped");
    let writer = MappedWriter::create(&path, &shape(), MappedOptions::default()).unwrap();
    let mut lane = writer.lane();
    give(&mut lane);
    lane.drain().unwrap();
    writer.complete(&shape()).unwrap();
    path
}

fn legacy(directory: &Path) -> PathBuf {
    let path = directory.join("legacy");
    let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape()).unwrap();
    give(&mut writer);
    std::fs::write(&path, writer.finish(&shape()).unwrap()).unwrap();
    path
}

fn open(path: &Path) -> Arc<ServedImage> {
    let options = ImageOptions { cache_limit_bytes: 1 << 20, ..ImageOptions::default() };
    Arc::new(ServedImage::open(path, &options).unwrap())
}

/// Connects a served image to the test: the test gets the other end of each connection.
#[derive(Default)]
struct Play(Mutex<Vec<Channel>>);

impl Play {
    /// The other end of the next connection.
    fn next(&self) -> Destination {
        let begin = Instant::now();
        loop {
            if let Some(channel) = self.0.lock().pop() {
                channel.set_own_stall_limit(Some(Duration::from_secs(20)));
                return Destination { channel, came: vec![vec![None; 300], vec![None; 70]], last: 0 };
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "nobody connects");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Link for Play {
    fn open(&self, _: Purpose, _: Duration, _: &CancelFlag) -> Result<Channel, TransportError> {
        let (ours, theirs) = Channel::pair()?;
        self.0.lock().push(theirs);
        Ok(ours)
    }

    fn name(&self) -> String {
        "the test".into()
    }
}

/// A destination that the test plays.
struct Destination {
    channel: Channel,
    came: Vec<Vec<Option<Vec<u8>>>>,
    last: usize,
}

impl Destination {
    fn bytes(&self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.channel.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// All bytes up to and including `end`.
    fn until(&self, end: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        while !bytes.ends_with(end) {
            bytes.extend(self.bytes(1));
        }
        bytes
    }

    fn say(&self, message: &ReturnMessage) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        // A refused connection may already be closed.
        let _ = self.channel.write_all(&bytes);
    }

    fn ask(&self, block: Option<&str>, start: u64, length: u32) {
        self.say(&ReturnMessage::RequestPages { block: block.map(Into::into), start, length });
    }

    /// Reads everything up to and including the package, and reports that the devices were read.
    fn accept(&self) {
        self.accept_until_package();
        self.say(&ReturnMessage::Pong(3));
    }

    fn accept_until_package(&self) {
        // Header, configuration, two commands, ADVISE, block list, an empty PART, PING: all lengths are known.
        let opening = self.bytes(8 + 9 + 5 + 9 + 21 + 17 + 8 + 11 + 12 + 8 + 5 + 18 + 9);
        assert!(opening.ends_with(&[8, 0, 2, 0, 4, 0, 0, 0, 0x10]), "{opening:x?}");
        self.say(&ReturnMessage::Pong(1));
        self.say(&ReturnMessage::Pong(0x10));
        let discards = self.bytes(5 + (5 + 5 + 16) + (5 + 6 + 16) + 9);
        assert!(discards.ends_with(&[8, 0, 2, 0, 4, 0, 0, 0, 2]), "{discards:x?}");
        let packaged = self.bytes(9);
        let length = u32::from_be_bytes(packaged[5..].try_into().unwrap());
        let package = self.bytes(length as usize);
        assert!(package.windows(5).any(|bytes| bytes == b"state"));
        self.say(&ReturnMessage::Pong(2));
    }

    fn load(&self) {
        self.accept();
        self.say(&ReturnMessage::Pong(0x42));
    }

    /// Reads one section of RAM. Returns false if it was the END, which EOF follows.
    fn section(&mut self) -> bool {
        let kind = self.bytes(5)[0];
        while let Some((block, page, bytes)) = self.record() {
            assert!(self.came[block][page].replace(bytes).is_none(), "page {page} of {block} came twice");
        }
        assert_eq!(self.bytes(5), [0x7e, 0, 0, 0, 2]);
        if kind == 3 {
            assert_eq!(self.bytes(1), [0]);
        }
        kind == 2
    }

    fn record(&mut self) -> Option<(usize, usize, Vec<u8>)> {
        let word = u64::from_be_bytes(self.bytes(8).try_into().unwrap());
        let (flags, offset) = (word & 0xfff, word & !0xfff);
        if flags == 0x10 {
            return None;
        }
        if flags & 0x20 == 0 {
            let length = self.bytes(1)[0];
            let name = String::from_utf8(self.bytes(length.into())).unwrap();
            self.last = NAMES.iter().position(|known| *known == name).unwrap();
        }
        let bytes = match flags & !0x20 {
            2 => {
                assert_eq!(self.bytes(1), [0]);
                vec![0; 4096]
            }
            8 => self.bytes(4096),
            other => panic!("flags {other:x}"),
        };
        Some((self.last, (offset >> 12) as usize, bytes))
    }

    /// Reads the rest, and reports that everything has arrived.
    fn finish(mut self) {
        while self.section() {}
        self.say(&ReturnMessage::Shut(0));
        self.check_all();
    }

    fn check_all(&self) {
        for (block, pages) in self.came.iter().enumerate() {
            for (page, came) in pages.iter().enumerate() {
                let wanted = content(block, page as u64).unwrap_or([0; 4096]);
                assert!(came.as_deref() == Some(&wanted[..]), "page {page} of {block} is missing or wrong");
            }
        }
    }
}

fn limits() -> WaitLimits {
    WaitLimits { setup: Duration::from_secs(20), stall: Duration::from_secs(20), ..WaitLimits::default() }
}

fn serve(image: &Arc<ServedImage>, options: ServeOptions) -> (Serving, Arc<Play>) {
    let play = Arc::new(Play::default());
    let link: Arc<dyn Link> = play.clone();
    (Serving::start(Arc::clone(image), link, options).unwrap(), play)
}

fn options() -> ServeOptions {
    ServeOptions { limits: limits(), ..ServeOptions::default() }
}

#[test]
fn destination_gets_every_page_of_a_mapped_image_and_of_a_stream() {
    let directory = tempfile::tempdir().unwrap();
    for (path, access) in
        [(mapped(directory.path()), Access::Places), (legacy(directory.path()), Access::Index)]
    {
        let image = open(&path);
        assert_eq!(image.access(), access);
        let (serving, play) = serve(&image, options());
        let destination = play.next();
        destination.load();
        destination.ask(Some("rom"), 69 * 4096, 4096);
        destination.ask(None, 0, 70 * 4096);

        destination.finish();

        serving.wait().unwrap();
        let statistics = serving.statistics();
        assert_eq!(
            (statistics.stage, statistics.missing_pages, statistics.requests),
            (Stage::Completed, 0, 2)
        );
        let held =
            PAGES.iter().enumerate().flat_map(|(block, pages)| (0..*pages).map(move |page| (block, page)));
        let with_content =
            held.filter(|(block, page)| content(*block, *page).is_some_and(|bytes| bytes != [0; 4096]));
        assert_eq!(statistics.content_pages, with_content.count() as u64);
    }
}

#[test]
fn pages_that_the_devices_need_are_sent_while_they_load() {
    let directory = tempfile::tempdir().unwrap();
    let (serving, play) = serve(&open(&mapped(directory.path())), options());
    let mut destination = play.next();
    destination.accept();
    destination.ask(Some("m0"), 250 * 4096, 4096);

    destination.section();

    assert!(destination.came[0][250].is_some());
    assert_eq!(
        destination.came.iter().flatten().flatten().count(),
        1,
        "nothing else comes before it has loaded"
    );
    destination.say(&ReturnMessage::Pong(0x42));
    destination.finish();
    serving.wait().unwrap();
}

/// A destination's wrong messages, and the expected error.

#[test]
fn bad_requests_end_it_with_an_error_that_names_the_rule() {
    let request = |block: Option<&str>, start, length| ReturnMessage::RequestPages {
        block: block.map(Into::into),
        start,
        length,
    };
    let bitmap = ReturnMessage::ReceivedBitmap { block: "m0".into() };
    let bad = |start, length, why| BadAnswer::Request { block: "m0".into(), start, length, why };
    let outside = BadRequest::Outside { block_bytes: 0x12c000 };
    let cases = [
        (request(Some("vga"), 0, 4096), BadAnswer::UnknownBlock { block: "vga".into() }),
        (request(None, 0, 4096), BadAnswer::RequestWithoutBlock),
        (request(Some("m0"), 300 * 4096, 4096), bad(300 * 4096, 4096, outside)),
        (request(Some("m0"), u64::MAX - 4095, 4096), bad(u64::MAX - 4095, 4096, outside)),
        (request(Some("m0"), 5, 4096), bad(5, 4096, BadRequest::Unaligned)),
        (request(Some("m0"), 0, 0), bad(0, 0, BadRequest::Empty)),
        (bitmap, BadAnswer::UnaskedBitmap),
        (ReturnMessage::ResumeAck(1), BadAnswer::UnaskedResume),
        (ReturnMessage::Shut(0), BadAnswer::EarlyEnd),
        (ReturnMessage::Pong(0x42), BadAnswer::Pong { ping: 0x42, is_known: true }),
    ];
    let directory = tempfile::tempdir().unwrap();
    let image = open(&mapped(directory.path()));
    for (message, expected) in cases {
        let (serving, play) = serve(&image, options());
        let destination = play.next();
        destination.load();
        destination.say(&message);

        let ServeFailure { error, guest } = serving.wait().unwrap_err();

        let MigrationError::PeerMisbehaved(Misbehaviour::Answer(why)) = &error else { panic!("{error}") };
        assert_eq!(*why, expected);
        assert_eq!(guest, GuestState::NeedsImage, "{error}");
    }
}

#[test]
fn destination_that_refuses_before_the_devices_come_has_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (serving, play) = serve(&open(&mapped(directory.path())), options());
    drop(play.next());

    let failure = serving.wait().unwrap_err();

    assert_eq!(failure.guest, GuestState::Nowhere, "{failure}");
}

/// Waits until the destination's silence has that meaning, or none.
fn wait_for_silence(serving: &Serving, wanted: Option<Silence>) {
    let begin = Instant::now();
    while serving.statistics().silence != wanted {
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", serving.statistics());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn destination_that_answers_nothing_or_loads_nothing_is_suspected_until_it_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let image = open(&mapped(directory.path()));
    let (serving, play) = serve(&image, options());
    let destination = play.next();

    wait_for_silence(&serving, Some(Silence::ReadsNothing));

    assert!(!serving.statistics().has_answered);
    destination.accept();
    wait_for_silence(&serving, None);
    assert!(serving.statistics().has_answered);
    destination.say(&ReturnMessage::Pong(0x42));
    destination.finish();
    serving.wait().unwrap();

    let (serving, play) = serve(&image, options());
    let destination = play.next();
    destination.accept_until_package();
    wait_for_silence(&serving, Some(Silence::LoadsNothing));
    [3, 0x42].into_iter().for_each(|ping| destination.say(&ReturnMessage::Pong(ping)));
    destination.finish();
    serving.wait().unwrap();
    assert_eq!(serving.statistics().silence, None);
}

#[test]
fn destination_that_breaks_off_while_it_loads_may_have_started_the_guest() {
    let directory = tempfile::tempdir().unwrap();
    let window = ServeOptions { reconnect_window: Duration::from_secs(20), ..options() };
    let (serving, play) = serve(&open(&mapped(directory.path())), window);
    let destination = play.next();
    destination.accept();
    drop(destination);

    let failure = serving.wait().unwrap_err();

    assert_eq!(failure.guest, GuestState::Uncertain, "{failure}");
}

/// A QEMU whose `postcopy-preempt` is off closes a second connection, if it accepts it before it loads.
#[test]
fn destination_that_closes_the_preempt_channel_without_a_page_is_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let image = open(&mapped(directory.path()));
    for (is_loaded, state) in [(false, GuestState::Uncertain), (true, GuestState::NeedsImage)] {
        let (serving, play) = serve(&image, ServeOptions { preempt: true, ..options() });
        let destination = play.next();
        destination.accept();
        drop(play.next());
        if is_loaded {
            destination.say(&ReturnMessage::Pong(0x42));
        }
        // One of the last pages. The background does not get there, because the main channel is not read.
        destination.ask(Some(NAMES[1]), 68 * 4096, 4096);

        let failure = serving.wait().unwrap_err();

        let MigrationError::PeerIncompatible(difference) = &failure.error else { panic!("{failure}") };
        assert!(matches!(difference, Difference::PreemptClosed { .. }), "{difference}");
        assert_eq!(failure.guest, state);
    }
}

#[test]
fn many_requests_at_once_are_answered_with_each_page_once() {
    let directory = tempfile::tempdir().unwrap();
    let (serving, play) = serve(&open(&mapped(directory.path())), options());
    let destination = play.next();
    destination.accept();
    let mut bytes = Vec::new();
    for turn in 0..100_000u64 {
        let message = ReturnMessage::RequestPages {
            block: (turn == 0).then(|| "m0".into()),
            start: turn * 7919 % 300 * 4096,
            length: 4096,
        };
        message.encode(&mut bytes).unwrap();
    }
    ReturnMessage::Pong(0x42).encode(&mut bytes).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| destination.channel.write_all(&bytes).unwrap());
    });

    destination.finish();

    serving.wait().unwrap();
    assert_eq!(serving.statistics().requests, 100_000);
}

#[test]
fn destination_that_never_reads_is_given_up_and_others_are_served_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let image = open(&mapped(directory.path()));
    let stall = Duration::from_millis(300);
    let impatient = ServeOptions { limits: WaitLimits { stall, ..limits() }, ..ServeOptions::default() };
    let (hanging, play) = serve(&image, impatient);
    let silent = play.next();
    silent.load();

    let (serving, play) = serve(&image, options());
    let destination = play.next();
    destination.load();
    destination.finish();
    serving.wait().unwrap();
    let failure = hanging.wait().unwrap_err();

    assert!(matches!(failure.error, MigrationError::Transport(_)), "{failure}");
    assert_eq!(failure.guest, GuestState::NeedsImage);
    drop(silent);
}

/// Answers the questions of a recovery. The destination has the first `have` pages of each block.
fn recover(destination: &Destination, have: usize, size: u64) {
    for (name, pages) in NAMES.into_iter().zip(PAGES) {
        let question = destination.bytes(5 + 1 + name.len());
        assert!(question.ends_with(name.as_bytes()), "{question:x?}");
        destination.say(&ReturnMessage::ReceivedBitmap { block: name.into() });
        let mut received = ReceivedPages::none(pages + size);
        (0..have as u64).for_each(|page| received.add(page));
        let mut bytes = Vec::new();
        received.encode(&mut bytes);
        let _ = destination.channel.write_all(&bytes);
        if size > 0 {
            return;
        }
    }
    assert_eq!(destination.bytes(5), [8, 0, 9, 0, 0]);
    destination.say(&ReturnMessage::ResumeAck(1));
}

#[test]
fn destination_that_comes_back_gets_exactly_what_it_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let window = ServeOptions { reconnect_window: Duration::from_secs(20), ..options() };
    let (serving, play) = serve(&open(&mapped(directory.path())), window);
    let mut destination = play.next();
    destination.load();
    destination.section();
    drop(destination);

    let mut again = play.next();
    recover(&again, 20, 0);
    // Writes the test's own pages, as if they had arrived.
    for block in 0..2 {
        for page in 0..20 {
            again.came[block][page] = Some(content(block, page as u64).unwrap_or([0; 4096]).to_vec());
        }
    }
    again.finish();

    serving.wait().unwrap();
    assert_eq!(serving.statistics().recoveries, 1);
}

#[test]
fn bitmap_of_another_size_is_another_guests_and_nothing_is_sent() {
    let directory = tempfile::tempdir().unwrap();
    let (serving, play) =
        serve(&open(&mapped(directory.path())), ServeOptions { recover: true, ..options() });
    let destination = play.next();
    recover(&destination, 0, 640);

    let failure = serving.wait().unwrap_err();

    let MigrationError::Wire { error, .. } = &failure.error else { panic!("{failure}") };
    assert_eq!(error.paragraph, "specs/postcopy.md §5", "{failure}");
    assert_eq!(failure.guest, GuestState::NeedsImage);
}

#[test]
fn image_that_changes_is_not_served_any_more() {
    let directory = tempfile::tempdir().unwrap();
    let path = mapped(directory.path());
    let (serving, play) = serve(&open(&path), options());
    let destination = play.next();
    destination.accept();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(5)).unwrap();
    destination.ask(Some("m0"), 4096, 4096);

    let failure = serving.wait().unwrap_err();

    let changed: Option<&ImageError> = crate::support::cause(&failure.error);
    assert!(matches!(changed, Some(ImageError::Changed { .. })), "{failure}");
}

#[test]
fn stop_leaves_a_guest_that_lacks_pages_for_another_server() {
    let directory = tempfile::tempdir().unwrap();
    let image = open(&mapped(directory.path()));
    let (serving, play) = serve(&image, ServeOptions { preempt: true, ..options() });
    let destination = play.next();
    std::thread::scope(|scope| {
        // The channel for requested pages connects when the machine is accepted.
        scope.spawn(|| destination.load());
    });
    while serving.statistics().stage != Stage::Active {
        std::thread::sleep(Duration::from_millis(1));
    }

    serving.stop();

    let failure = serving.wait().unwrap_err();
    assert!(matches!(failure.error, MigrationError::Cancelled), "{failure}");
    assert_eq!(failure.guest, GuestState::NeedsImage);
}
