//! The errors of lower layers stay reachable, and the sentences are whole.

use sterna_transport::Direction;

use super::*;

/// The texts of `error` and of its sources.
fn chain(error: &MigrationError) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut next = error.source();
    while let Some(source) = next {
        texts.push(source.to_string());
        next = source.source();
    }
    texts
}

/// Asserts that `text` is a clause as the project writes it: without a full stop, question or gap.
pub(crate) fn assert_whole(text: &str) {
    assert!(!text.ends_with(['.', '?', '!', ' ', ':', ';']), "{text:?}");
    assert!(!text.starts_with(' ') && !text.contains("  ") && !text.contains('?'), "{text:?}");
    assert!(text.contains(' '), "one word: {text:?}");
}

fn told() -> std::io::Error {
    std::io::Error::other("told to fail")
}

/// The texts of `#[error("…")]` in `source`, with an X for each placeholder.
fn sentences(source: &str) -> Vec<String> {
    let begins = source.split("#[error(").skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"'));
    begins.map(sentence).collect()
}

/// The literal with which `rest` begins, up to its closing quote.
fn sentence(rest: &str) -> String {
    let (mut text, mut depth) = (String::new(), 0);
    let mut letters = rest.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => break,
            '\\' if letters.peek() == Some(&'\n') => {
                while letters.next_if(|c| c.is_whitespace()).is_some() {}
            }
            '\\' => text.extend(letters.next()),
            '{' => {
                text.push('X');
                depth += 1;
            }
            '}' => depth -= 1,
            _ if depth == 0 => text.push(letter),
            _ => {}
        }
    }
    text
}

fn sources(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| !path.ends_with("tests.rs")).collect()
}

/// The declarations are read, so that no cause is forgotten.
#[test]
fn every_sentence_of_a_cause_is_a_clause_that_another_one_may_follow() {
    let mut count = 0;
    for area in ["error", "start_error"] {
        for path in sources(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(area)) {
            for text in sentences(&std::fs::read_to_string(&path).unwrap()) {
                count += 1;
                let place = path.display();
                assert!(!text.ends_with(['.', '!', ' ', ';']) && !text.starts_with(' '), "{place}: {text:?}");
                assert!(!text.contains("  ") && !text.contains('?'), "{place}: {text:?}");
            }
        }
    }
    assert!(count > 150, "{count} sentences");
    assert_eq!(
        sentences("#[error(\n    \"a {b:?}, \\\n     c \\\"d\\\"\",\n e)] #[error(transparent)]"),
        ["a X, c \"d\""]
    );
}

#[test]
fn every_cause_keeps_the_error_of_the_layer_below() {
    let peer = || "tcp:192.0.2.1:1".to_owned();
    let vm = || VmError::new("loading", "told to fail");
    let broken = || TransportError::Stalled {
        channel: peer(),
        direction: Direction::Read,
        offset: 0,
        after: Duration::ZERO,
    };
    for error in [
        Misbehaviour::Payload { codec: "zstd", why: BadPayload::Corrupt(Arc::new(told())) }.into(),
        Misbehaviour::Connection { peer: peer(), why: BadConnection::Contact(Arc::new(told())) }.into(),
        #[cfg(feature = "standby")]
        BadProtection::Epoch { device: "disk".into(), instance: 0, why: vm() }.into(),
        MachineDifference::Record(vm()).into(),
        ProtectionDifference::Arbiters { peer: peer(), why: Arc::new(told()) }.into(),
        MigrationError::system("thread: told to fail".to_owned(), told()),
    ] {
        let error: MigrationError = error;
        let chain = chain(&error);
        assert!(chain.len() > 1 && chain.last().unwrap().contains("told to fail"), "{chain:?}");
        assert!(chain[0].contains("told to fail"), "the sentence names the cause: {chain:?}");
    }
    let lost = MigrationError::from(Ending::NotAdmitted { peer: peer(), error: Arc::new(broken()) });
    assert!(chain(&lost).contains(&broken().to_string()), "{:?}", chain(&lost));
    assert!(chain(&broken().into()).len() > 1);
}

#[test]
fn area_of_a_cause_decides_whose_fault_it_is() {
    assert_eq!(MigrationError::from(BadAnswer::Unasked).fault(), Some(Fault::PeerMisbehaved));
    assert_eq!(MigrationError::from(MemoryDifference::CopiesThere).fault(), Some(Fault::PeerIncompatible));
    assert_eq!(MigrationError::from(Ending::Lost).fault(), None);
    let limit = MigrationError::Limit { what: Awaited::Loading, after: Duration::from_secs(1) };
    assert_eq!(limit.fault(), Some(Fault::PeerMisbehaved));
}

#[test]
fn sentences_are_whole_and_have_single_spaces() {
    let late = MigrationError::from(Untimely::Postcopy(UntimelyCommand::Resume));
    assert_eq!(
        late.to_string(),
        "the source sent POSTCOPY_RESUME at a wrong time: it comes first on a connection in place of one that was lost \
         (specs/postcopy.md §5); the peer broke the protocol"
    );
    let taken = BadConnection::Taken { role: ChannelRole::Multifd(3) };
    let taken = MigrationError::from(Misbehaviour::Connection { peer: "tcp:a:1".into(), why: taken });
    assert_eq!(
        taken.to_string(),
        "tcp:a:1: it claims to be multifd channel 3, which is connected already; check whether another source migrates here; \
         the peer broke the protocol"
    );
    let preempt = MigrationError::from(SettingDifference::Preempt { is_on_here: true });
    assert_eq!(
        preempt.to_string(),
        "postcopy-preempt is on here and off at the destination: set it alike; the two sides are set up differently"
    );
    let parts = MigrationError::from(BadPage::TooManyParts { most: 3, are_large: true });
    assert!(parts.to_string().contains("huge pages of more than 2 MiB came"), "{parts}");
}

#[test]
fn migration_that_does_not_converge_names_rates_settings_and_this_side() {
    use Remedy::*;
    let why = NoConvergence {
        dirtied_bytes_per_second: 900_000_000,
        sendable_bytes_per_second: 17_000_000,
        is_bandwidth_limited: true,
        downtime: Duration::from_millis(4000),
        downtime_limit: Duration::from_millis(50),
        device_streams: Duration::ZERO,
        remedies: vec![RaiseDowntimeLimit, RaiseBandwidthLimit, FewerWrites],
    };
    assert_eq!(
        why.to_string(),
        "the guest dirties 900 MB/s, 17 MB/s can be sent under the bandwidth limit, and the downtime would be 4000 ms where \
         the downtime limit is 50 ms. Raise the downtime limit, raise the bandwidth limit, or reduce the guest's writes"
    );
    let streams = NoConvergence { device_streams: Duration::from_millis(70), ..why.clone() };
    assert!(streams.to_string().contains("50 ms. Devices' state takes 70 ms of it"), "{streams}");
    let remedies = vec![
        RaiseDowntimeLimit,
        RaiseBandwidthLimit,
        MoreChannels,
        Multifd,
        LowerDirtyLimit,
        AutoConverge,
        RaiseThrottle,
        FewerWrites,
    ];
    remedies.iter().for_each(|remedy| assert_whole(&remedy.to_string()));
    for why in [
        NoConvergence { remedies, ..why.clone() },
        NoConvergence { is_bandwidth_limited: false, ..why },
        streams,
    ] {
        let error = MigrationError::NotConverging { why: Arc::new(why) };
        assert_whole(&error.to_string());
        assert_eq!(error.fault(), Some(Fault::Local));
        assert!(chain(&error).len() == 2);
    }
}
