//! Checkpoints that end with a summary (`specs/replica.md §7`): the standby holds a checkpoint only if it matches its
//! summary.

use sterna::Compression;
use sterna::error::{Difference, MigrationError, ProtectionDifference};
use sterna_wire::replica::{CheckpointSummary, PageSums};
use zstd::stream::write::Encoder as ZstdEncoder;

use super::protected::{Bench, World};
use super::*;
use heart::{Heart, secret};
use primary::{section, summary};

/// How pages are sent.
#[derive(Debug, Clone, Copy)]
struct Way {
    lanes: u8,
    /// Whether pages are sent as differences.
    delta: bool,
    compression: Compression,
}

const NONE: Compression = Compression::None;
const WAYS: [Way; 8] = [
    Way { lanes: 0, delta: false, compression: NONE },
    Way { lanes: 0, delta: true, compression: NONE },
    Way { lanes: 1, delta: false, compression: NONE },
    Way { lanes: 1, delta: true, compression: NONE },
    Way { lanes: 1, delta: false, compression: Compression::Zstd },
    Way { lanes: 4, delta: false, compression: NONE },
    Way { lanes: 4, delta: true, compression: NONE },
    Way { lanes: 4, delta: false, compression: Compression::Zstd },
];

/// The error in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// A page has other content.
    Content,
    /// Another page has the content.
    Place,
    LeftOut,
    Twice,
    ZeroInstead,
    Number,
    /// A byte of a device differs.
    Device,
    NoSummary,
    NotTheLast,
    TooShort,
}

const PAGES: [Page; 5] = [(0, 3, 5), (0, 4, 6), (0, 9, 7), (1, 2, 8), (1, 3, 9)];

/// A standby whose guest is seeded.
struct Bed {
    standby: Standby,
    primary: Primary,
    /// Needed if differences over lanes must be announced.
    _contact: Option<(Bench, Heart)>,
}

impl Bed {
    fn new(way: Way) -> Self {
        let (standby, contact) = if way.delta && way.lanes > 0 {
            let bench = Bench::new(Arc::<World>::default(), way.lanes, &options(), true);
            let to = bench.standby.address();
            let heart = Heart::greet_announcing_differences(&to, &secret()).expect("greeted");
            (bench.standby.clone(), Some((bench, heart)))
        } else {
            let (params, capabilities) = settings(way.lanes);
            let params = Parameters { multifd_compression: way.compression, ..params };
            let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
            let standby = Standby::listen(&at, &options(), params, capabilities, Arc::new(()));
            (standby.expect("listening"), None)
        };
        let mut primary = Primary::connect(&standby.address(), way.lanes);
        primary.summaries = Some(1);
        if way.compression == Compression::Zstd {
            let lane = |_| ZstdEncoder::new(Vec::new(), 1).expect("a level");
            primary.zstd = (0..way.lanes).map(lane).collect();
        }
        primary.send_seeding(true);
        primary.hear("00020004 00000001 00010004 00000000 00000000");
        Self { standby, primary, _contact: contact }
    }

    /// Sends a checkpoint with this error. Its summary describes the correct one.
    fn checkpoint(&mut self, way: Way, number: u64, wrong: Wrong) {
        let Self { primary, .. } = self;
        let fill = |page: &Page| (page.0, page.1, page.2 + number as u8);
        let (pages, deltas): (Vec<Page>, _) = (PAGES.iter().map(fill).collect(), way.delta);
        let mut sums = PageSums::default();
        for &(block, page, fill) in &pages {
            let mut content = [fill; PAGE_SIZE];
            if deltas {
                content.copy_from_slice(&primary.ram[block][page * PAGE_SIZE..][..PAGE_SIZE]);
                content[16] = fill;
            }
            sums.page(block, page as u64, &content);
        }
        let mut sent = pages;
        match wrong {
            Wrong::Content => sent[1].2 ^= 1,
            Wrong::Place => sent[2].1 += 1,
            Wrong::LeftOut => drop(sent.pop()),
            Wrong::Twice => sent.push(sent[1]),
            Wrong::ZeroInstead => sent[2].2 = 0,
            _ => {}
        }
        primary.begin_checkpoint();
        if deltas {
            let bytes: Vec<_> = sent.iter().map(|page| [16, 1, page.2]).collect();
            let each = sent.iter().zip(&bytes).map(|(page, bytes)| (page.0, page.1, &bytes[..]));
            let each: Vec<(usize, usize, &[u8])> = each.collect();
            if way.lanes > 0 {
                primary.send_deltas_on_lanes(&each);
                primary.send_ram(&[]);
            } else {
                primary.send_deltas(&each);
            }
        } else {
            primary.send_ram(&sent);
        }
        let blob = blob_of(number, sums, wrong);
        primary.write(&[0]);
        primary.say(Message::VmstateSize { bytes: blob.len() as u64 });
        primary.write(&blob);
    }
}

/// Device state of a checkpoint, with its summary.
fn blob_of(number: u64, pages: PageSums, wrong: Wrong) -> Vec<u8> {
    let mut sections = blob(number as u8);
    sections.pop();
    let said = if wrong == Wrong::Number { number + 1 } else { number };
    let (id, name, mut body) = summary(&CheckpointSummary::of(said, pages, &sections));
    if wrong == Wrong::TooShort {
        body.pop();
        body[3] -= 1;
    }
    let mut end = Vec::new();
    section(id, name, &body, &mut end);
    match wrong {
        Wrong::Device => {
            // The last byte of a body, before its footer.
            let at = sections.len() - 6;
            sections[at] ^= 1;
            [sections, end, vec![0]].concat()
        }
        Wrong::NoSummary => [sections, vec![0]].concat(),
        Wrong::NotTheLast => [end, sections, vec![0]].concat(),
        _ => [sections, end, vec![0]].concat(),
    }
}

#[test]
fn checkpoint_that_is_not_as_its_summary_says_is_dropped_and_the_one_before_is_taken_over() {
    let cases = [
        (Wrong::Content, "checkpoint 2: its digest of the pages is"),
        (Wrong::Place, "checkpoint 2: its digest of the pages is"),
        (Wrong::LeftOut, "checkpoint 2: its count of normal pages is 4, but 5 in the primary's summary"),
        (Wrong::Twice, "checkpoint 2: its count of normal pages is 6, but 5 in the primary's summary"),
        (Wrong::ZeroInstead, "checkpoint 2: its count of normal pages is 4, but 5 in the primary's summary"),
        (Wrong::Number, "checkpoint 2: its number is 2, but 3 in the primary's summary"),
        (Wrong::Device, "checkpoint 2: its digest of the sections is"),
        (Wrong::NoSummary, "section \"sterna/checkpoint\" instance 0 of the seeding is missing"),
        (Wrong::NotTheLast, "checkpoint 2: section \"sterna/checkpoint\" is not the last one"),
        (Wrong::TooShort, "checkpoint 2: it has 39 bytes, not 40"),
    ];
    for way in WAYS {
        for (wrong, says) in cases {
            // A difference cannot describe a page that is zero.
            if way.delta && wrong == Wrong::ZeroInstead {
                continue;
            }
            // Over lanes, a page that is sent twice between two flushes is refused with or without a summary.
            let says = if way.lanes > 0 && wrong == Wrong::Twice { "came twice" } else { says };
            let mut bed = Bed::new(way);
            bed.checkpoint(way, 1, Wrong::Nothing);
            bed.primary.hear("00000005 00000006");
            let sound = bed.primary.ram.clone();

            bed.checkpoint(way, 2, wrong);

            let why = lost(&bed.standby).to_string();
            assert!(why.contains(says), "{way:?}, {wrong:?}: {why}");
            assert_eq!(bed.standby.held().map(|held| held.number), Some(1), "{way:?}, {wrong:?}");
            // In contact with a primary, a takeover first asks the arbiter.
            if bed.standby.contact().is_none() {
                assert_takes_over(&bed.standby, 1, &sound, 1);
            }
        }
    }
}

#[test]
fn checkpoints_that_are_as_their_summaries_say_are_held_one_after_the_other() {
    for way in WAYS {
        let mut bed = Bed::new(way);
        for number in 1..=5 {
            bed.checkpoint(way, number, Wrong::Nothing);
            bed.primary.hear("00000005 00000006");
        }
        assert_eq!(bed.standby.held().map(|held| held.number), Some(5), "{way:?}");
    }
}

#[test]
fn seeding_whose_summaries_have_another_version_is_refused() {
    let standby = listen(0, &options());
    let mut primary = Primary::connect(&standby.address(), 0);
    primary.summaries = Some(2);
    primary.send_seeding(true);

    let why = lost(&standby);

    let MigrationError::PeerIncompatible(Difference::Protection(difference)) = &why else { panic!("{why}") };
    let is_version = matches!(difference, ProtectionDifference::SummaryVersion { version: 2, known: 1, .. });
    assert!(is_version, "{why}");
}
