//! A primary that knows the secret and follows the format, but does not read the answers.

use super::*;

/// A primary that the test plays, in contact, at the other end of this channel.
struct PlayedPrimary {
    channel: Arc<Channel>,
    session: sterna_wire::replica::Session,
}

impl PlayedPrimary {
    fn greet(channel: Channel, lease: Duration) -> Self {
        use sterna_wire::replica::{Hello, Role, Session, Terms as WireTerms, Welcome};
        let terms = WireTerms {
            heartbeat_us: 20_000,
            lease_us: lease.as_micros() as u32,
            margin_us: 100_000,
            claim_interval_us: 50_000,
            drift_per_mille: 10,
        };
        let binding = channel.tls_binding();
        let hello = Hello::new([7; 16], 1, false, terms, [1; 16], &secret(), &binding);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        channel.write_all(&bytes).unwrap();
        let mut answer = [0; Welcome::BYTES];
        channel.read_exact(&mut answer).unwrap();
        let (welcome, _) = Welcome::decode(&answer).unwrap().unwrap();
        let mut session = Session::new(Role::Primary, &secret(), &hello, &welcome, &binding);
        bytes.clear();
        session.seal_arbiter(&ArbiterIdentity::default(), &mut bytes).unwrap();
        channel.write_all(&bytes).unwrap();
        let mut head = [0; ArbiterIdentity::HEAD_BYTES];
        channel.read_exact(&mut head).unwrap();
        let mut rest = vec![0; ArbiterIdentity::rest_bytes(head).unwrap()];
        channel.read_exact(&mut rest).unwrap();
        Self { channel: Arc::new(channel), session }
    }

    /// Sends `count` heartbeats. Returns false if the connection has ended.
    fn beat(&mut self, first: u64, count: u64) -> bool {
        let mut bytes = Vec::new();
        for number in first..first + count {
            self.session.seal(sterna_wire::replica::Message::Heartbeat(number), &mut bytes).unwrap();
        }
        self.channel.write_all(&bytes).is_ok()
    }
}

/// Set in the process of the test that measures memory.
const ALONE: &str = "STERNA_TEST_FLOOD_ALONE";

/// Runs the flood in a process of its own, because the guests of other tests are memory of this process.
#[test]
fn primary_that_floods_heartbeats_and_reads_no_answer_is_given_up_and_costs_no_memory() {
    const NAME: &str =
        "contact::flood::primary_that_floods_heartbeats_and_reads_no_answer_is_given_up_and_costs_no_memory";
    if std::env::var_os(ALONE).is_some() {
        return flood();
    }
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    let done = alone.args(["--exact", NAME, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

fn flood() {
    fn resident() -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }
    let (near, far) = Channel::pair().expect("a pair of sockets");
    let arbiter = Arc::<Arbiter>::default();
    let greeted = std::thread::spawn(move || {
        StandbyContact::begin(&Arc::new(far), &secret(), Arc::<Guest>::default(), |_| arbiter.of("standby"))
    });
    let mut primary = PlayedPrimary::greet(near, Duration::from_secs(60));
    let standby = greeted.join().unwrap().unwrap();
    standby.checkpoint_held(1).expect("the first");
    let before = resident();

    // 52 MB; the answers have the same size.
    let mut rounds = 0;
    while rounds < 1000 && primary.beat(1 + rounds * 1000, 1000) {
        rounds += 1;
    }

    wait_for("the end of the contact", || !standby.is_in_contact());
    let grown = resident().saturating_sub(before);
    assert!(grown < 8 << 20, "{} MiB", grown >> 20);
    let trouble = standby.state().trouble.expect("a reason");
    assert!(trouble.contains("has not read"), "{trouble}");
}
