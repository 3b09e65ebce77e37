"""Names of people, days, towns and places in the town hall."""

# The person of a story, with pronoun and possessive.
PEOPLE = (
    ("my sister", "she", "her"),
    ("my neighbour Ruth", "she", "her"),
    ("my brother", "he", "his"),
    ("my cousin Daniel", "he", "his"),
    ("my aunt", "she", "her"),
    ("a friend from the choir", "she", "her"),
    ("the man next door", "he", "his"),
    ("my colleague Amina", "she", "her"),
    ("my old schoolmate Tom", "he", "his"),
    ("a woman from our street", "she", "her"),
    ("my uncle", "he", "his"),
    ("my friend Mei", "she", "her"),
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")

TOWNS = tuple(
    first + last
    for first in (
        *("Alder", "Amber", "Ash", "Birch", "Bram", "Cald", "Copper", "Dun", "Elder", "Elm", "Fair", "Fern", "Glen"),
        *("Hazel", "Heather", "Kel", "Lark", "Maple", "Otter", "Raven", "Rowan", "Silver", "Thistle", "Willow"),
    )
    for last in ("bridge", "bury", "combe", "field", "ford", "ham", "mere", "stead", "wick", "worth")
)

PLACES = {
    "street": tuple(
        f"{name} {kind}"
        for name in (
            *("Abbey", "Baker", "Bell", "Bridge", "Canal", "Castle", "Chapel", "Church", "Cooper", "Crown", "Dyer"),
            *("Garden", "Harbour", "High", "Linden", "Market", "Mill", "North", "Orchard", "Park", "Poplar", "Priory"),
            *("Queen", "River", "Rose", "Saddler", "South", "Spring", "Station", "Tanner", "Temple", "Victoria"),
        )
        for kind in ("Street", "Road")
    ),
    "park": tuple(
        f"{name} {kind}"
        for name in (
            *(
                "Albert",
                "Beech",
                "Chestnut",
                "Coronation",
                "Deer",
                "Fountain",
                "Jubilee",
                "King's",
                "Lakeside",
                "Memorial",
            ),
            *("Orchard", "Palace", "Pond", "Priory", "Queen's", "Riverside", "Rose", "Swan", "Victoria", "Walnut"),
        )
        for kind in ("Park", "Gardens")
    ),
    "square": tuple(
        f"{name} Square"
        for name in (
            *("Abbey", "Anchor", "Bell", "Bishop", "Castle", "Cathedral", "Chapel", "Corn", "Fountain", "George"),
            *("Guildhall", "Harbour", "Hay", "Horse", "King's", "Linden", "Lion", "Market", "Mill", "Minster"),
            *("Old", "Palace", "Queen's", "Rose", "Saint Mary's", "Station", "Swan", "Tower", "Wool", "York"),
        )
    ),
    "hill": tuple(
        f"{name} {kind}"
        for name in (
            *("Barrow", "Beacon", "Bell", "Cloud", "Crow", "Fox", "Gallows", "Hare", "Hawk", "Heron", "Kite", "Lark"),
            *("Maiden", "Ram", "Raven", "Round", "Shepherd's", "Stone", "Thorn", "Windmill"),
        )
        for kind in ("Hill", "Down")
    ),
    "school": tuple(
        f"{name} School"
        for name in (
            *("Ashgrove", "Beechwood", "Bridge Street", "Brookside", "Castlegate", "Chapel Lane", "Cherry Tree"),
            *("Eastfield", "Fairview", "Greenbank", "Grove Road", "Hillcrest", "Holly Lodge", "Kingsway", "Lakeside"),
            *("Meadowbank", "Millfield", "Moorland", "Newbridge", "Northgate", "Oakdale", "Parkside", "Riverbank"),
            *("Saint Anne's", "Southgate", "Springhill", "Stonehill", "Sunnyside", "Valley Road", "Westgate"),
        )
    ),
    "area": (
        *("Abbotsfield", "Ashgrove", "Bankside", "Beechwood", "Bellfield", "Brookside", "Canalside", "Castlegate"),
        *("Clayhill", "Cornfields", "Eastgate", "Ferry Hill", "Foxhole", "Glebelands", "Greenbank", "Halfway"),
        *("Harbourside", "Highmoor", "Hillside", "Kingsmead", "Lakeside", "Longmeadow", "Lower Mill", "Millbank"),
        *("Moorside", "Newtown", "Northgate", "Oldchurch", "Orchard End", "Parkside", "Quarry Bank", "Ropewalk"),
        *("Saltmarsh", "Southgate", "Springwell", "Stonebridge", "Tanners' Row", "Upper Mill", "Westgate", "Woodside"),
    ),
}
