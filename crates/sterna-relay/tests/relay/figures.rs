//! Figures of sessions: what a stream shows, and what was lost and sent again.

use std::io::{Read, Write};
use std::net::Shutdown;

use sterna_relay::phase::{Phase, StreamReader};
use sterna_relay::relay::{Figures, Limit, Notice, SessionStatus};
use sterna_wire::PAGE_SIZE;
use sterna_wire::WireError;
use sterna_wire::return_path::ReturnMessage;

use crate::phases::{PAGES, Stream};
use crate::whole::{Pair, pattern, precopy, read_all, send, until};

const PAGE: u64 = PAGE_SIZE as u64;

#[test]
fn remaining_ram_is_exact_in_the_first_round_and_zero_after_the_last() -> Result<(), WireError> {
    let mut reader = StreamReader::new(true);
    let begin = Stream::begin(true)?;
    reader.feed(&begin.bytes).unwrap();
    assert_eq!(reader.progress().total_bytes(), Some(PAGES * PAGE));
    assert_eq!(reader.progress().remaining_bytes(), Some(PAGES * PAGE));

    let mut stream = Stream::begin(true)?;
    for (pages, left, round) in [(0..3, PAGES - 3, 1), (3..PAGES, 0, 1)] {
        stream.ram(pages, false)?;
        let mut reader = StreamReader::new(true);
        reader.feed(&stream.bytes).unwrap();
        let progress = reader.progress();
        assert_eq!((progress.remaining_bytes(), progress.round()), (Some(left * PAGE), round));
    }
    // In the second round the pages so far tell how dense the rest is: all of the first half.
    stream.ram(0..PAGES / 2, false)?;
    let mut reader = StreamReader::new(true);
    reader.feed(&stream.bytes).unwrap();
    assert_eq!((reader.progress().round(), reader.progress().last_round_pages()), (2, PAGES));
    assert_eq!(reader.progress().remaining_bytes(), Some(PAGES / 2 * PAGE));
    stream.ram(0..1, true)?;
    stream.end()?;
    reader = StreamReader::new(true);
    reader.feed(&stream.bytes).unwrap();
    assert_eq!(reader.progress().remaining_bytes(), Some(0));
    Ok(())
}

fn ours(pair: &Pair) -> Figures {
    pair.dialer.figures().expect("a session is open")
}

#[test]
fn figures_show_a_migration_at_both_relays() {
    let pair = Pair::start(|options, _| options.is_raw = false);
    assert!(pair.dialer.figures().is_none() && pair.acceptor.figures().is_empty());
    let (mut source, mut target) = pair.flow();
    let mut stream = precopy(true);
    source.write_all(&stream.bytes).unwrap();
    target.read_exact(&mut vec![0; stream.bytes.len()]).unwrap();

    // The second carrier may still be in its greeting.
    until("both carriers", || ours(&pair).carriers == 2);
    let now = ours(&pair);
    assert_eq!((now.role_word(), now.phase.clone(), now.round), ("source", Some(Phase::Ram { round: 1 }), 1));
    assert_eq!((now.ram_bytes, now.route.as_str()), (Some(PAGES * PAGE), "web1"));
    assert_eq!(now.processed_bytes, stream.bytes.len() as u64);
    assert_eq!((now.status, now.downtime, now.carriers), (SessionStatus::Running, None, 2));
    assert!(now.peer.as_ref().is_some_and(|peer| peer.contains("127.0.0.1")), "{now:?}");
    until("the destination's figures", || {
        pair.acceptor.figures().iter().any(|theirs| {
            theirs.session == now.session
                && theirs.processed_bytes == now.processed_bytes
                && theirs.round == 1
        })
    });

    let sent = stream.bytes.len();
    stream.ram(0..1, true).unwrap();
    stream.end().unwrap();
    source.write_all(&stream.bytes[sent..]).unwrap();
    target.read_exact(&mut vec![0; stream.bytes.len() - sent]).unwrap();
    until("the end", || ours(&pair).phase == Some(Phase::Ended));
    let stopped = ours(&pair);
    assert!(stopped.downtime.is_some() && !stopped.is_downtime_over, "{stopped:?}");
    assert_eq!(stopped.remaining_bytes, Some(0));
    let mut shut = Vec::new();
    ReturnMessage::Shut(0).encode(&mut shut).unwrap();
    target.write_all(&shut).unwrap();
    target.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&source), shut);
    source.shutdown(Shutdown::Write).unwrap();

    pair.wait_for("both ends", |notice| matches!(notice, Notice::Ended { .. }));
    let notices = pair.notices.lock().unwrap();
    let last = notices.iter().find_map(|notice| match notice {
        Notice::Ended { figures, .. } => Some(figures),
        _ => None,
    });
    let last = last.unwrap();
    assert!(last.is_downtime_over && last.status == SessionStatus::Over, "{last:?}");
    assert_eq!((last.ram_bytes, last.phase.clone()), (Some(PAGES * PAGE), Some(Phase::Ended)));
}

#[test]
fn figures_count_lost_carriers_and_what_is_sent_again() {
    let pair = Pair::start(|_, _| {});
    let (source, mut target) = pair.flow();
    let bytes = pattern(3, 40 << 20);
    let sender = send(source.try_clone().unwrap(), bytes.clone());
    let mut got = vec![0; 4 << 20];
    target.read_exact(&mut got).unwrap();
    pair.proxy.cut();
    got.extend(read_all(&target));
    assert!(got == bytes);
    sender.join().unwrap();

    let now = ours(&pair);
    assert!(now.lost_carriers >= 2 && now.reconnections >= 2, "{now:?}");
    assert!(now.sent_bytes == now.processed_bytes + now.resent_bytes, "{now:?}");
    assert_eq!((now.compression_ratio(), now.phase_word()), (1.0, "none"));
}

#[test]
fn session_is_ended_by_its_id() {
    let pair = Pair::start(|_, _| {});
    let (source, target) = pair.flow();
    let id = ours(&pair).session;

    assert!(pair.dialer.end_session(id, "the test ends it"));

    assert!(read_all(&source).is_empty() && read_all(&target).is_empty());
    assert!(!pair.dialer.end_session(id, "again"));
    pair.wait_for(
        "the reason",
        |notice| matches!(notice, Notice::Ended { how, .. } if how.contains("the test")),
    );
}

#[test]
fn limit_holds_up_no_bytes_that_are_asked_for_and_slows_the_rest() {
    let limit = Limit::new(1_000_000);
    let pair = Pair::start(|options, is_ours| {
        if is_ours {
            options.limit = limit.clone();
        }
    });
    let (source, mut target) = pair.flow();
    let sender = send(source.try_clone().unwrap(), pattern(5, 8 << 20));
    let mut begun = vec![0; 1 << 20];
    target.read_exact(&mut begun).unwrap();
    let slow = ours(&pair);
    assert!(slow.rate < 4_000_000, "{slow:?}");
    // The answers of the destination's side have a relay without a limit, and their acknowledgements never wait.
    target.write_all(b"answer").unwrap();
    (&source).read_exact(&mut [0; 6]).unwrap();

    limit.set(0);

    assert_eq!(read_all(&target).len(), 7 << 20);
    sender.join().unwrap();
}
