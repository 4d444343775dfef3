//! Choice of channels when strangers connect as well. Each test states which other connections exist, so no
//! clock decides.

use super::*;

const OURS: Uuid = [1; 16];
const STRANGERS: Uuid = [2; 16];
const HOUR: Duration = Duration::from_secs(3600);

/// Places for two multifd channels and a main channel.
fn places(grace: Duration) -> Places {
    Places { grace, ..Places::new(2) }
}

/// Two ends of a connection.
fn connection() -> (Arc<Channel>, Channel) {
    let (ours, theirs) = Channel::pair().unwrap();
    (Arc::new(ours), theirs)
}

fn is_main(places: &Places, channel: &Arc<Channel>) -> bool {
    places.main().is_some_and(|main| Arc::ptr_eq(&main, channel))
}

#[test]
fn initial_packets_of_strangers_do_not_decide_which_channels_are_the_migrations() {
    let places = places(HOUR);
    let peers: Vec<_> = (0..5).map(|_| connection()).collect();
    for (id, (lane, _)) in peers.iter().enumerate().take(2) {
        assert_eq!(places.offer_lane(id, STRANGERS, lane, &|| true), Offer::Waits);
    }
    // The source's multifd channels have not sent their initial packets when its main channel has.
    let main = &peers[4].0;
    assert_eq!(places.offer_main(main, &|| true), Offer::Waits);
    assert_eq!(places.offer_lane(0, OURS, &peers[2].0, &|| true), Offer::Waits);
    assert_eq!(places.offer_lane(1, OURS, &peers[3].0, &|| false), Offer::Completes);
    assert!(is_main(&places, main));
    assert!(peers[0].0.is_shut_down() && peers[1].0.is_shut_down());
}

#[test]
fn main_channel_that_comes_last_is_waited_with_anew() {
    let places = places(HOUR);
    let peers: Vec<_> = (0..3).map(|_| connection()).collect();
    for (id, (lane, _)) in peers.iter().enumerate().take(2) {
        assert_eq!(places.offer_lane(id, OURS, lane, &|| true), Offer::Waits);
    }
    let ready = places.state.lock().ready_since.expect("every multifd place has a candidate");
    std::thread::sleep(Duration::from_millis(1));
    assert_eq!(places.offer_main(&peers[2].0, &|| true), Offer::Waits);
    assert!(places.state.lock().ready_since.is_some_and(|since| since > ready));
    assert_eq!(places.wait_main(&peers[2].0, HOUR, &|| false), Fate::Completes);
}

#[test]
fn strangers_whole_configuration_gives_way_to_the_newest_while_others_may_come() {
    let places = places(HOUR);
    let peers: Vec<_> = (0..4).map(|_| connection()).collect();
    let (stranger, main) = (&peers[0].0, &peers[1].0);
    assert_eq!(places.offer_main(stranger, &|| true), Offer::Waits);
    for id in 0..2 {
        assert_eq!(places.offer_lane(id, OURS, &peers[2 + id].0, &|| true), Offer::Waits);
    }
    assert_eq!(places.offer_main(main, &|| false), Offer::Completes);
    assert!(is_main(&places, main));
    assert_eq!(places.wait_main(stranger, HOUR, &|| false), Fate::Displaced);
}

#[test]
fn main_channel_whose_peer_has_closed_is_taken_only_if_nobody_is_left() {
    // No grace period.
    let places = places(Duration::ZERO);
    let peers: Vec<_> = (0..2).map(|_| connection()).collect();
    let (dead, peer) = connection();
    drop(peer);
    assert_eq!(places.offer_main(&dead, &|| true), Offer::Waits);
    for (id, (lane, _)) in peers.iter().enumerate().take(2) {
        assert_eq!(places.offer_lane(id, OURS, lane, &|| true), Offer::Waits);
    }
    let (younger, _peer) = connection();
    assert_eq!(places.offer_main(&younger, &|| true), Offer::Completes, "one that is there");
    assert!(is_main(&places, &younger));

    let recorded = Places { grace: Duration::ZERO, ..Places::new(0) };
    assert_eq!(recorded.offer_main(&dead, &|| true), Offer::Completes, "all of it may have come");
}

#[test]
fn main_channel_that_is_open_is_taken_before_a_newer_one_that_is_not() {
    let places = places(Duration::ZERO);
    let peers: Vec<_> = (0..3).map(|_| connection()).collect();
    let (dead, peer) = connection();
    drop(peer);
    for main in [&peers[2].0, &dead] {
        assert_eq!(places.offer_main(main, &|| true), Offer::Waits);
    }
    assert_eq!(places.offer_lane(0, OURS, &peers[0].0, &|| true), Offer::Waits);
    assert_eq!(places.offer_lane(1, OURS, &peers[1].0, &|| true), Offer::Completes);
    assert!(is_main(&places, &peers[2].0));
    assert_eq!(places.wait_main(&dead, HOUR, &|| true), Fate::Displaced);
}
