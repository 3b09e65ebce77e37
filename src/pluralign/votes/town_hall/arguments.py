"""Arguments that fit any issue: values, fairness, figures, stories, cost, reasons and concessions.

``writing`` chooses among them. The braces are explained in ``phrases``.
"""

# Reasons of a position, by axis and sign, or by stance. The two ends of an axis are two subjects with different
# vocabularies: people of opposite values seldom talk about the same thing, and encoders recognise subjects best.
VALUE_TAGS: dict[tuple[str, int], tuple[str, ...]] = {
    ("public_spending", 1): (
        "a generous town takes care of everyone",
        "good public services make a community strong",
        "families, the old and the sick deserve our help",
        "caring for each other is worth every effort",
    ),
    ("public_spending", -1): (
        "the budget is tight and taxes are high enough",
        "taxpayers' money has to be saved",
        "a town must not run into debt",
        "the council should spend less and tax us less",
    ),
    ("change", 1): (
        "a modern town needs new ideas",
        "it is time for something fresh and new",
        "innovation brings a place to life",
        "tomorrow will not be like yesterday",
    ),
    ("change", -1): (
        "heritage deserves our respect",
        "the customs of our grandparents hold us together",
        "hundreds of years of history should be kept alive",
        "the old ways are part of who we are",
    ),
    ("environment", 1): (
        "wildlife and clean air come before everything else",
        "the climate and the planet cannot wait",
        "trees, birds and rivers need our protection",
        "nature has suffered enough",
    ),
    ("environment", -1): (
        "jobs and business need support",
        "people's comfort and convenience count for more",
        "everyday life has to stay easy and affordable",
        "a prosperous economy is good for all of us",
    ),
    ("rules", 1): (
        "law and order protect all of us",
        "the weak need strict rules against the reckless",
        "public safety and discipline come first",
        "offenders must be kept in check",
    ),
    ("rules", -1): (
        "personal freedom comes first",
        "free people can make their own choices",
        "everyone should be left to live their own life",
        "liberty matters more than tidiness",
    ),
}

BALANCE_TAGS: dict[str, tuple[str, ...]] = {
    "compromise": (
        "peace between neighbours is worth more than winning",
        "nobody should have to lose completely",
        "each side deserves half of what it wants",
        "both camps have a point",
        "a deal is better than a feud",
    ),
    "undecided": (
        "too many questions are still open",
        "I am torn between the two sides",
        "nobody has explained it well enough to me",
        "the reports contradict each other",
        "I have heard good arguments on both sides",
    ),
}

# Sentences about values, in longer answers.
VALUES: dict[tuple[str, int], tuple[str, ...]] = {
    ("public_spending", 1): (
        "a caring community provides for its children, its old people and its sick",
        "good services, open to everybody, are what makes a town generous",
        "I want a town that looks after people and shares what it has",
        "clinics, playgrounds and libraries are how a community shows that it cares",
        "we are at our best when we provide for one another",
        "generosity towards families and older people always comes back to us",
        "a helping hand for everyone is the heart of public service",
    ),
    ("public_spending", -1): (
        "the budget is tight, and every pound was earned by a taxpayer",
        "a council has to live within its means and keep out of debt",
        "taxes are high enough, and thrift is a virtue",
        "before another bill lands on the taxpayer, the council should cut its spending",
        "savings today mean lower taxes tomorrow",
        "debts have to be repaid, with interest, out of our wages",
        "a balanced budget matters more than any wish list",
    ),
    ("change", 1): (
        "the future belongs to people who try new ideas",
        "modern towns experiment, learn and invent",
        "I am excited by innovation, and I would like to see more of it here",
        "young people want a fresh, modern place with new possibilities",
        "progress begins with somebody who dares to try something new",
        "let us be pioneers and invent the town of tomorrow",
        "new technology and new thinking could transform this place",
    ),
    ("change", -1): (
        "our grandparents handed down these customs, and we should keep them",
        "tradition and heritage are what makes this old town our home",
        "centuries of history deserve respect",
        "old customs bind the generations together",
        "I love the old ways, the old buildings and the old songs",
        "what our ancestors cherished should be passed on to our grandchildren",
        "the past is a treasure, and it is ours to guard",
    ),
    ("environment", 1): (
        "nature, wildlife and clean air should come first",
        "the climate is warming, and every town must cut its carbon",
        "trees, birds, bees and rivers need somebody to speak for them",
        "we have only one planet, and its forests and oceans are suffering",
        "a green town full of gardens, hedgehogs and clean water is what I want",
        "pollution makes us ill, and the earth pays for it too",
        "biodiversity is vanishing before our eyes, and we can help to save it",
    ),
    ("environment", -1): (
        "jobs and wages come first, and businesses need room to grow",
        "a strong local economy feeds every family in town",
        "working people need convenience, roads and affordable energy",
        "people's comfort comes first, and their wages with it",
        "comfort and prosperity are nothing to be ashamed of",
        "everyday convenience makes life easier for busy families",
        "trade and industry built this town and still pay its wages",
    ),
    ("rules", 1): (
        "law and order keep everybody safe",
        "strict rules protect the weak from the reckless",
        "safety comes first, and offenders should be fined",
        "discipline and clear regulations prevent accidents and harm",
        "wardens and police need rules that they can enforce",
        "where nothing is forbidden, bullies and troublemakers take over",
        "danger and nuisance have to be stopped by law",
    ),
    ("rules", -1): (
        "adults should be free to choose for themselves",
        "freedom is the greatest thing a town can give",
        "everyone has the right to live as they like",
        "I trust my neighbours to make their own choices",
        "liberty, independence and personal choice are worth defending",
        "leave people alone, and they will work it out between them",
        "my home, my life, my choice",
    ),
}

BALANCE: dict[str, tuple[str, ...]] = {
    "compromise": (
        "a handshake in the middle keeps the peace",
        "good neighbours meet halfway, and then they have tea together",
        "compromise is how two camps become one town again",
        "if each side gives a little, both can sign the agreement",
        "I would rather build a bridge than win a quarrel",
        "a balanced deal, with something for each side, will last longest",
        "peace between the two camps is worth half of what I wanted",
    ),
    "undecided": (
        "I keep changing my mind, depending on whom I talked to last",
        "to me it is a puzzle, and I cannot solve it tonight",
        "the more I read about it, the more questions I have",
        "I would rather wait another year than guess",
        "I simply do not know enough to answer",
        "there are too many open questions and too few answers",
        "doubt is uncomfortable, but I cannot pretend to have an opinion",
    ),
}

# Introductions of the supporting argument.
SUPPORT_FRAMES = {
    "figures": (
        "here are the numbers: ",
        "look at the figures: ",
        "the statistics are these: ",
        "the numbers speak: ",
    ),
    "story": (
        "let me tell you a story: ",
        "a story from my own life: ",
        "listen to this story: ",
        "one story stays with me: ",
    ),
    "fairness": (
        "it is a question of fairness: ",
        "ask yourselves what is just: ",
        "think of fairness, too: ",
        "this is about justice: ",
    ),
    "cost": ("then there is the price: ", "think of the cost: ", "money matters here: ", "let us look at the bill: "),
}

SUPPORT: dict[tuple[str, str], tuple[str, ...]] = {
    ("figures", "for"): (
        "in the last survey {percent} percent of {count} people said yes",
        "no fewer than {count} residents signed in favour within {weeks} weeks",
        "{other} tried it, and {percent} percent voted to keep it",
        "the trial in {other} was rated good by {percent} percent of {count} people",
    ),
    ("figures", "against"): (
        "in the last survey {percent} percent of {count} people said no",
        "no fewer than {count} residents signed against it within {weeks} weeks",
        "{other} tried it, and {percent} percent voted to end it",
        "the trial in {other} was rated poor by {percent} percent of {count} people",
    ),
    ("figures", "compromise"): (
        "in the last survey {percent} percent of {count} people asked for a compromise",
        "{other} chose a middle way, and {percent} percent were content after {weeks} weeks",
        "of {count} letters to the council, {percent} percent wanted something in between",
    ),
    ("figures", "undecided"): (
        "in the last survey {percent} percent of {count} people had no opinion yet",
        "{other} counted for {weeks} weeks and found a difference of only {points} percent",
        "of {count} letters to the council, {percent} percent take no side",
    ),
    ("fairness", "for"): (
        "anything else would be unfair to {gains}",
        "{gains} should count for once",
        "{gains} have waited long enough for their fair share",
        "{gains} deserve the same chance as everyone else",
    ),
    ("fairness", "against"): (
        "it would be unfair to {loses}",
        "{loses} must not be forgotten",
        "{loses} would have to carry the whole burden",
        "{loses} deserve better than to pay for everybody else's wishes",
    ),
    ("fairness", "compromise"): (
        "that would be fair to {gains} and to {loses} alike",
        "{gains} and {loses} should each get a share",
        "neither {gains} nor {loses} should carry the whole burden",
    ),
    ("fairness", "undecided"): (
        "I cannot tell what would be fair to both {gains} and {loses}",
        "what is fair to {gains} looks unjust to {loses}",
        "what {gains} are owed does not seem to fit with what {loses} are owed",
    ),
    ("story", "compromise"): (
        "{who} is for it and I was not, and over a pot of tea we settled on this in an evening",
        "at our kitchen table {who} argued for hours, and in the end we met in the middle",
        "{who} and I have not agreed on anything since Easter, but we agree on this",
        "I grew up in {other}, where they did just that, and {who} still praises it",
    ),
    ("story", "undecided"): (
        "{who} is for it, my best friend is not, and I have tea with both of them",
        "I talked about it with {who} until midnight, and we ended where we had begun",
        "{who} asked me on the stairs what I think, and I had nothing to say",
        "last week {who} nearly convinced me, and then I walked past and saw it differently",
    ),
}

# Sentences about the price, by stance and by whether the proposal saves money.
COST: dict[tuple[str, bool], tuple[str, ...]] = {
    ("for", False): (
        "it would cost about £{money}, and that is cheap for what we get",
        "at £{money} it is good value for money",
        "the £{money} it costs would be paid back within {years} years",
        "a bill of £{money} is not much for something that lasts",
    ),
    ("for", True): (
        "it would leave about £{money} more in the town's purse",
        "we would be £{money} better off within {years} years",
        "the £{money} it brings would pay for things we really need",
        "the budget would gain £{money}, and nobody would pay a penny more",
    ),
    ("against", False): (
        "it would cost about £{money}, and that is far too dear",
        "at £{money} it is poor value for money",
        "the £{money} it costs would be missing elsewhere for {years} years",
        "some £{money} would have to be found, and nobody has said where",
    ),
    ("against", True): (
        "the £{money} it is said to bring would be eaten up by other costs",
        "for £{money} we would be giving away far too much",
        "the promised £{money} would be gone within {years} years",
        "a gain of £{money} is a poor price for what would be lost",
    ),
    ("compromise", False): (
        "that way we would spend about half of the £{money}",
        "it would keep the price well below £{money}",
        "the bill would shrink from £{money} to something we can afford",
    ),
    ("compromise", True): (
        "that way the budget would still gain about half of the £{money}",
        "we would keep a good part of the £{money} without paying for it in anger",
        "most of the £{money} would still reach the town's purse",
    ),
    ("undecided", False): (
        "nobody could tell me whether £{money} is a fair price",
        "one report speaks of £{money} and another of twice as much",
        "I do not know whether £{money} is cheap or dear for it",
    ),
    ("undecided", True): (
        "nobody could tell me whether the promised £{money} is real",
        "one report speaks of a gain of £{money} and another of none",
        "I do not know what the £{money} it brings would cost us elsewhere",
    ),
}

REASON_OPENINGS = {
    "firm": ("without question, ", "there is no doubt that ", "beyond all doubt, ", "it is absolutely certain that "),
    "even": ("",),
    "hedged": ("it seems to me that ", "as far as I can tell, ", "it may well be that ", "possibly, "),
}

LINKS = ("also, ", "besides, ", "on top of that, ", "what is more, ", "and ", "")

BOTH_SIDES = (
    "it is true that {pro}, and it is just as true that {con}",
    "one side is right that {pro}, and the other is right that {con}",
    "some say that {pro}, while others answer that {con}",
    "on the one hand, {pro}; on the other hand, {con}",
)

ONE_SIDE = ("supporters say that {pro}", "opponents reply that {con}")

CONCESSIONS = {
    "for": (
        "I know the worry that {con}, and I do not brush it aside",
        "some will object that {con}, and that can be dealt with",
        "it may be that {con}, but that is not the whole picture",
    ),
    "against": (
        "I know the hope that {pro}, and I do not laugh at it",
        "some will answer that {pro}, and that is no small thing",
        "it may be that {pro}, but that is not the whole picture",
    ),
    "compromise": (
        "neither camp will cheer, and both will manage",
        "nobody gets everything that way, and nobody goes home with nothing",
    ),
    "undecided": (
        "both camps have told me that the matter is simple, and I do not believe it",
        "if either side had a perfect answer, we would not be sitting here",
    ),
}
